"""Planted faults are found by kind, with the bytes and FLOPs that follow from the sizes; their clean twins give no finding.

Steps are those of `faulty_steps`, compiled for CPU and, where CPU can't show the fault, for absent GPUs and TPUs.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from remat_kit import remat
from remat_kit.analysis.findings import StepFacts, check_remedies, find_findings, same_numbers
from remat_kit.compile.pool import Worker
from remat_kit.errors import CompileError, IdleRuleWarning
from remat_kit.findings import Change, Finding, FindingKind, Measured, Remedy, Verdict
from remat_kit.memory import PeakKind
from remat_kit.records import CompareRow, Status
from remat_kit.trace import graph_of, report_graph, summarise
from remat_kit.trace.residuals import residual_report
from remat_kit.verbs.question import Answer, Insides, Question, Task

DEPTH, BATCH, SEQ, WIDTH, VOCAB = 6, 8, 256, 256, 4096
FF = 4 * WIDTH
F32, BF16 = 4, 2
IS_OLD = jax.__version_info__ < (0, 12)  # XLA made float32 of bfloat16 on CPU, and dropped barriers there
WEIGHTS = 2 * DEPTH * WIDTH * FF  # elements of the MLP stack
ONE_MATMUL = 2 * DEPTH * BATCH * SEQ * WIDTH * FF  # of all layers


@pytest.fixture(scope="module")
def explained():
    """Explains a faulty step; one worker for all, each question once."""
    with Worker() as worker:

        @functools.cache
        def ask(task=Task.EXPLAIN, **given) -> Insides | Answer:
            names = {field.name for field in dataclasses.fields(Question)}
            settings = {name: value for name, value in given.items() if name in names}
            options = tuple((name, str(value).lower()) for name, value in given.items() if name not in names)
            defaults = {"policy": "full", "most_checks": 0}
            defaults |= {"factory": "tests.faulty_steps:step"}
            question = Question(task=task, options=options, **(defaults | settings))
            return msgspec.convert(worker.ask(msgspec.to_builtins(question)), Insides if task is Task.EXPLAIN else Answer)

        yield ask


@pytest.fixture(scope="module")
def sharded(explained):
    """Explains an MLP stack whose weights lie on eight devices a part each; see `explain_steps`."""
    return functools.partial(explained, factory="tests.explain_steps:stack")


def kinds(insides: Insides) -> list[FindingKind]:
    return [finding.kind for finding in insides.findings]


def the_only(insides: Insides, kind: FindingKind) -> Finding:
    (finding,) = (each for each in insides.findings if each.kind is kind)
    return finding


# Steps without a fault; each stands beside the planted ones that differ from it in one thing.
CLEAN = {
    "full": {},
    "saving": {"policy": "save(up)"},
    "logits in chunks": {"vocab": VOCAB},
    "attention with statistics": {"block": "attention", "policy": "save(attn,lse)"},
    "on a GPU": {"target": "h100"},
    "unrolled with barriers": {"target": "h100", "unrolls": True},
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_steps_have_no_findings(explained, name):
    allowed = {FindingKind.UNROLLED_LAYERS} if CLEAN[name].get("unrolls") else set()
    assert set(kinds(explained(**CLEAN[name]))) == allowed


@pytest.mark.parametrize("target", ["cpu:8", pytest.param("h100:8", marks=pytest.mark.slow)])
def test_a_gathered_layer_is_no_copy_of_the_stack(sharded, target):
    assert kinds(sharded(target=target)) == []


@pytest.mark.slow
def test_a_cast_that_the_compiler_moved_out_of_the_loop_is_the_compilers(sharded):
    """Without rematerialization it casts each device's part of all layers before the loop, to gather half the bytes."""
    depth, width, devices = 4, 512, 8
    finding = the_only(sharded(target=f"h100:{devices}", policy="none"), FindingKind.WEIGHT_COPIES)
    assert "the compiler moved the cast" in finding.message
    assert finding.bytes_at_stake == 2 * depth * width * 4 * width * BF16 // devices
    assert finding.remedy is not None
    assert finding.remedy.change == Change(casts="outside")


@pytest.mark.slow
def test_weights_that_only_recomputation_gathers_are_named(explained):
    layers, model, kv, ff, devices = 4, 4096, 1024, 14_336, 8
    ask = functools.partial(explained, factory="models:llama3_8b", target=f"h100:{devices}", layers=layers)
    finding = the_only(ask(policy="full"), FindingKind.EXTRA_WEIGHT_GATHERS)
    assert {name.split("'")[3] for name in finding.names} == {"q", "k", "v", "attn_out", "gate", "up"}  # down runs once
    weights = 2 * model * model + 2 * model * kv + 2 * model * ff
    assert finding.wire_bytes_at_stake == layers * weights * BF16 * (devices - 1) // devices
    assert FindingKind.EXTRA_WEIGHT_GATHERS not in kinds(ask(policy="none"))


@pytest.mark.slow
def test_a_toy_on_a_tpu_is_told_apart(explained):
    toy = explained(target="v5e:1x1", depth=4, batch=1, seq=128, width=128)
    assert kinds(toy) == [FindingKind.ON_CHIP_TOY]
    assert FindingKind.ON_CHIP_TOY not in kinds(explained(target="v5e:1x1", depth=4, batch=16, seq=1024, width=512))


@pytest.mark.parametrize(("target", "width"), [("h100", BF16), ("cpu", F32 if IS_OLD else BF16)])
def test_a_cast_outside_the_scan_keeps_a_copy_of_all_weights(explained, target, width):
    insides = explained(fault="cast outside", target=target)
    finding = the_only(insides, FindingKind.WEIGHT_COPIES)
    assert set(finding.names) == {"params['layers']['up']", "params['layers']['down']"}
    assert finding.bytes_at_stake == width * WEIGHTS
    assert "the step casts them" in finding.message
    assert finding.source.startswith("tests/faulty_steps.py:")
    assert kinds(insides) == [FindingKind.WEIGHT_COPIES]


@pytest.mark.parametrize("target", ["h100", pytest.param("cpu", marks=pytest.mark.slow)])
def test_the_other_placement_of_a_cast_compiles_like_a_step_written_so(explained, target):
    outside, inside = explained(fault="cast outside", target=target), explained(target=target)
    moved_inside = explained(fault="cast outside", target=target, most_checks=1).findings[0].checked
    assert moved_inside is not None
    assert moved_inside.after is not None
    assert moved_inside.after.total_bytes == pytest.approx(inside.memory.peak_bytes, rel=0.01)
    assert (moved_inside.verdict is Verdict.GAIN) == (inside.memory.peak_bytes < outside.memory.peak_bytes)
    moved_outside = explained(Task.MEASURE, target=target, casts="outside").compiled.device.total_bytes
    assert moved_outside == pytest.approx(outside.memory.peak_bytes, rel=0.01)


def test_a_name_on_a_blocks_output_saves_nothing(explained):
    insides = explained(fault="names output", policy="save(out)")
    assert kinds(insides) == [FindingKind.NEVER_RESIDUAL, FindingKind.SAME_PROGRAM]
    assert insides.findings[0].names == ("out",)
    assert explained().memory.peak_bytes == insides.memory.peak_bytes


def test_attention_output_saved_without_statistics_runs_again(explained):
    seq = SEQ // 2  # not the width: the matmuls of scores and values are told apart by shape
    insides = explained(fault="no statistics", block="attention", policy="save(attn)", seq=seq)
    finding = the_only(insides, FindingKind.SAVED_BUT_RECOMPUTED)
    assert finding.names == ("attn",)
    assert finding.bytes_at_stake == DEPTH * BATCH * seq * WIDTH * BF16
    assert finding.flops_at_stake == 2 * DEPTH * BATCH * seq * seq * WIDTH  # what the scores weigh
    assert finding.remedy is not None
    assert finding.remedy.change == Change(policy="full")


def test_an_undonated_momentum_is_found(explained):
    insides = explained(fault="momentum not donated")
    assert kinds(insides) == [FindingKind.NOT_DONATED]
    assert (insides.findings[0].names, insides.findings[0].bytes_at_stake) == (("momentum",), F32 * WEIGHTS)


def test_a_state_that_nobody_donates_is_there_twice(explained):
    insides = explained(donate=(), most_checks=1)
    finding = the_only(insides, FindingKind.NOT_DONATED)
    assert (finding.names, finding.bytes_at_stake) == (("params", "momentum"), 2 * F32 * WEIGHTS)
    assert finding.remedy is not None
    assert finding.remedy.change == Change(donate=(0, 1))
    assert finding.checked is not None
    assert finding.checked.verdict is Verdict.GAIN
    assert finding.checked.after is not None
    assert finding.checked.after.total_bytes == explained().memory.peak_bytes
    assert kinds(insides) == [FindingKind.NOT_DONATED]


def test_whole_logits_are_found_and_the_steps_own_offer_is_compiled(explained):
    insides = explained(fault="whole logits", vocab=VOCAB, most_checks=1)
    finding = the_only(insides, FindingKind.WHOLE_LOGITS)
    logits = BATCH * SEQ * VOCAB * F32
    lines = [line for line in insides.memory.peak_classes if line.kind is PeakKind.LOGITS and line.bytes >= logits]
    assert finding.bytes_at_stake == sum(line.bytes for line in lines)
    assert finding.bytes_at_stake >= logits
    assert finding.bytes_at_stake % (BATCH * SEQ * VOCAB * BF16) == 0
    assert finding.checked is not None
    assert finding.checked.verdict is Verdict.GAIN
    assert finding.checked.after is not None
    assert finding.checked.after.total_bytes == explained(vocab=VOCAB).memory.peak_bytes


def test_a_block_wrapped_twice(explained):
    insides = explained(fault="wrapped twice")
    assert kinds(insides) == [FindingKind.DOUBLE_WRAPPING]
    assert insides.findings[0].flops_at_stake == 0  # JAX drops what the outer region needs for nothing


def test_remat_of_unrolled_layers_without_barriers_is_undone(explained):
    insides = explained(fault="no barrier", unrolls=True, target="h100")
    finding = the_only(insides, FindingKind.RECOMPUTE_MERGED)
    up = BATCH * SEQ * FF * BF16
    assert finding.bytes_at_stake in ((DEPTH - 1) * up, DEPTH * up)  # the compiler may leave one layer alone
    assert set(kinds(insides)) == {FindingKind.RECOMPUTE_MERGED, FindingKind.UNROLLED_LAYERS}


def test_on_cpu_a_report_says_that_barriers_are_dropped(explained):
    unrolled = explained(unrolls=True)
    assert (FindingKind.RECOMPUTE_MERGED in kinds(unrolled)) is IS_OLD
    finding = the_only(explained(unrolls=True, fault="no barrier"), FindingKind.RECOMPUTE_MERGED)
    assert "jaxlib 0.10 drops barriers on CPU" in finding.message


def test_unrolled_layers_are_counted(explained):
    finding = the_only(explained(unrolls=True, target="h100"), FindingKind.UNROLLED_LAYERS)
    assert f"{DEPTH} copies" in finding.message


def test_a_state_that_fills_the_memory_is_said_with_what_would_help(explained):
    state = 3 * F32 * WEIGHTS  # parameters, momentum, gradients
    insides = explained(budget_bytes=state - 1)
    finding = the_only(insides, FindingKind.STATE_FILLS_MEMORY)
    gradients = sum(line.bytes for line in insides.memory.peak_classes if line.kind is PeakKind.GRADIENTS)
    assert 0 <= gradients - F32 * WEIGHTS <= BF16 * WIDTH * FF  # one layer's in bfloat16, where the compiler keeps that
    assert finding.bytes_at_stake == insides.memory.device.argument_bytes + gradients + 32 - (state - 1)
    assert finding.remedy is not None
    assert "8-bit moments take" in finding.remedy.text
    assert FindingKind.STATE_FILLS_MEMORY not in kinds(explained(budget_bytes=4 * state))


def test_every_kind_is_documented():
    text = (Path(__file__).parents[1] / "docs" / "findings.md").read_text(encoding="utf-8")
    assert [kind for kind in FindingKind if f"| `{kind}`" not in text] == []


@pytest.mark.parametrize(("policy", "grows"), [("offload(up)", True), ("offload(in)", False)])
def test_offloading_that_takes_more_of_the_device_than_recomputing(explained, policy, grows):
    insides = explained(policy=policy, target="h100", most_checks=1)
    assert kinds(insides) == [FindingKind.OFFLOAD_GROWS_DEVICE] * grows
    recomputed = explained(target="h100").memory.peak_bytes
    assert (insides.memory.peak_bytes > recomputed) == grows
    if grows:
        assert insides.findings[0].bytes_at_stake == insides.memory.peak_bytes - recomputed
        assert insides.findings[0].names == ("up",)


@pytest.mark.parametrize(("cost", "kinds_found"), [(None, [FindingKind.UNKNOWN_KERNEL]), (10, [])])
def test_a_kernel_without_a_price(explained, cost, kinds_found):
    def double(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    estimate = None if cost is None else pl.CostEstimate(flops=cost, transcendentals=0, bytes_accessed=0)
    x = jax.ShapeDtypeStruct((8, 128), "float32")
    kernel = pl.pallas_call(double, out_shape=x, name="double", cost_estimate=estimate)
    graph = graph_of(jax.jit(kernel).trace(x), (x,))
    insides, trace = explained(), summarise(graph)
    facts = StepFacts(
        policy="none",
        platform="tpu",
        budget_bytes=None,
        stacks=(),
        donate=(),
        num_leaves=(1,),
        graph=graph,
        residuals=report_graph(graph),
        trace=trace,
        baseline=trace,
        arguments=(),
        memory=insides.memory,
        work=insides.work,
    )
    found = find_findings(facts)
    assert [(each.kind, each.names) for each in found] == [(kind, ("double",)) for kind in kinds_found]


def test_a_name_that_no_value_has():
    def loss(x):
        return remat(lambda x: jnp.sin(checkpoint_name(jnp.sin(x), "inner")), "save(iner)")(x).sum()

    with pytest.warns(IdleRuleWarning, match="no value is named 'iner'"):  # remat says it too, where it is used
        (finding, *_) = residual_report(loss, jnp.ones(3)).findings
    assert finding.kind is FindingKind.NAME_UNMATCHED
    assert finding.message.endswith("Did you mean 'inner'?")


def rows(*pairs):
    return [
        CompareRow(
            policy=policy, target="cpu", status=Status.OK, argument_bytes=1, temp_bytes=temp, total_bytes=1 + temp, flops=7
        )
        for policy, temp in pairs
    ]


def test_policies_with_the_same_numbers():
    (finding,) = same_numbers(rows(("dots", 5), ("minimal", 5), ("full", 3)))
    assert finding.names == ("dots", "minimal")
    assert same_numbers(rows(("dots", 5), ("full", 3))) == ()


def suspicion(kind, **change):
    return Finding(kind=kind, message="m", remedy=Remedy(text="do it", change=Change(**change)))


BEFORE = Measured(total_bytes=1000, flops=1000)


@pytest.mark.parametrize(
    ("kind", "after", "verdict"),
    [
        (FindingKind.NOT_DONATED, (900, 1000), Verdict.GAIN),
        (FindingKind.NOT_DONATED, (1000, 1000), Verdict.NO_GAIN),
        (FindingKind.SAVED_BUT_RECOMPUTED, (900, 1100), Verdict.NO_GAIN),
        (FindingKind.WHOLE_LOGITS, (900, 1100), Verdict.GAIN),
    ],
)
def test_a_remedy_is_recommended_only_where_it_compiled_better(kind, after, verdict):
    (found,) = check_remedies(
        [suspicion(kind, policy="full")], lambda _: Measured(total_bytes=after[0], flops=after[1]), before=BEFORE, most=1
    )
    assert found.checked is not None
    assert found.checked.verdict is verdict
    assert found.remedy is not None
    assert (found.remedy.change is None) is (verdict is Verdict.NO_GAIN)


@pytest.mark.parametrize(
    ("kind", "after", "is_told"),
    [
        (FindingKind.LAST_LAYER_RECOMPUTED, (1001, 990), True),
        (FindingKind.LAST_LAYER_RECOMPUTED, (1100, 990), False),
        (FindingKind.OFFLOAD_GROWS_DEVICE, (900, 1100), True),
        (FindingKind.OFFLOAD_GROWS_DEVICE, (1100, 1100), False),
    ],
)
def test_a_suspicion_is_told_only_when_a_compile_confirms_it(kind, after, is_told):
    measured = Measured(total_bytes=after[0], flops=after[1])
    found = check_remedies([suspicion(kind, policy="x")], lambda _: measured, before=BEFORE, most=1)
    assert len(found) == is_told
    assert check_remedies([suspicion(kind, policy="x")], lambda _: measured, before=BEFORE, most=0) == ()


def test_only_the_most_valuable_remedies_are_compiled_and_a_failure_is_said():
    asked = []

    def fail(change):
        asked.append(change)
        raise CompileError("no memory\nmore")

    given = [suspicion(FindingKind.NOT_DONATED, donate=(number,)) for number in range(3)]
    found = check_remedies(given, fail, before=BEFORE, most=2)
    assert asked == [Change(donate=(0,)), Change(donate=(1,))]
    assert [each.checked and each.checked.reason for each in found] == ["no memory", "no memory", None]
