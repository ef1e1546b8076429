"""Readers of HLO, buffer assignment and live ranges, on hand-written texts and against brute force."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_kit.analysis.arguments import arguments_of
from remat_kit.analysis.assignment import AssignedValue, read_assignment, read_live_ranges
from remat_kit.analysis.collectives import collectives_of
from remat_kit.analysis.dump import read_dump
from remat_kit.analysis.hlo import attribute, source_of
from remat_kit.analysis.hlo_reader import read_module
from remat_kit.analysis.liveness import LiveValue, covered_bytes
from remat_kit.analysis.loops import executions, loops_of
from remat_kit.analysis.matmuls import matmul_flops, read_window, valid_positions
from remat_kit.analysis.report import check_totals
from remat_kit.analysis.shapes import arrays_of, element_of
from remat_kit.errors import DumpError
from remat_kit.memory import CollectiveMeaning, PeakKind, Space, SpaceTotals
from remat_kit.records import MemoryBytes

MODULE = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, num_partitions=4

FileNames
1 "train.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%padded (shard: f32[2,8]) -> f32[8,8] {
  %shard = f32[2,8]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %zeros = f32[8,8]{1,0} broadcast(%zero), dimensions={}
  %at = s32[] constant(2)
  ROOT %placed = f32[8,8]{1,0:T(8,128)} dynamic-update-slice(%zeros, %shard, %at, %at)
}

%body (carry: (s32[], f32[8,8], f32[2,8])) -> (s32[], f32[8,8], f32[2,8]) {
  %carry = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)}, f32[2,8]{1,0}) parameter(0)
  %count = s32[] get-tuple-element(%carry), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%count, %one)
  %field = f32[8,8]{1,0} fusion(%carry#2), kind=kLoop, calls=%padded
  %gathered = f32[8,8]{1,0} all-reduce(%field), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add, NAME
  %product = f32[8,8]{1,0} dot(%carry#1, %gathered), lhs_contracting_dims={1}, rhs_contracting_dims={0}, NAME
  ROOT %result = (s32[], f32[8,8]{1,0}, f32[2,8]{1,0}) tuple(%next, %product, /*index=2*/%carry#2)
}

%condition (state: (s32[], f32[8,8], f32[2,8])) -> pred[] {
  %state = (s32[], f32[8,8]{1,0}, f32[2,8]{1,0}) parameter(0)
  %limit = s32[] constant(9)
  %counter = s32[] get-tuple-element(%state), index=0
  ROOT %less = pred[] compare(%counter, %limit), direction=LT
}

ENTRY %main (w: f32[2,8], x: f32[8,8]) -> f32[8,8] {
  %w = f32[2,8]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}, metadata={op_name="params[\\'w\\']"}
  %x = f32[8,8]{1,0} parameter(1), sharding={replicated}, metadata={op_name="tokens"}
  %start = s32[] constant(2)
  %init = (s32[], f32[8,8]{1,0}, f32[2,8]{1,0}) tuple(%start, %x, %w)
  %loop = (s32[], f32[8,8]{1,0}, f32[2,8]{1,0}) while(%init), condition=%condition, body=%body
  ROOT %out = f32[8,8]{1,0} get-tuple-element(%loop), index=1
}
""".replace("NAME", 'metadata={op_name="jit(step)/jvp()/while/body/dot_general" stack_frame_id=1}')

ASSIGNMENT = """BufferAssignment:
allocation 0: size 64, parameter 0, shape |f32[2,8]| at ShapeIndex {}, maybe-live-out:
 value: <1 w @0> (size=64,offset=0): f32[2,8]{1,0}
allocation 1: size 512, color 1, page 0, preallocated-temp:
 value: <2 loop{1} (phi) @1> (size=256,offset=256): f32[8,8]{1,0:T(8,128)S(1)}
allocation 2: size 4, constant:
 value: <3 start @0> (size=4,offset=0): s32[]
allocation 3: size 2, thread-local:
 value: <4 x @0> (size=2,offset=0): bf16[]

Total bytes used: 582
"""

LIVE = """HloLiveRange (max 2):
  InstructionSequence:
    0:w
    1:loop
    2:out
  BufferLiveRange:
    w{}:0-2
    loop{1}:1-2
  Live ranges at 1 (peak):
    w{}: 64 bytes
"""


def test_module_is_read():
    module = read_module(MODULE)
    assert (module.name, module.entry, module.num_partitions, module.donated) == ("jit_step", "main", 4, {0})
    gathered = module.computations["body"].by_name["gathered"]
    assert source_of(module, gathered.frame) == "train.py:7"
    assert attribute(gathered, "replica_groups") == "{{0,1,2,3}}"
    assert gathered.called == ("add",)


def test_elements_of_tuples_are_spelled_out():
    body = read_module(MODULE).computations["body"]
    element = body.by_name["carry#2"]
    assert (element.opcode, element.shape, element.operands) == ("get-tuple-element", "f32[2,8]{1,0}", ("carry",))


def test_trip_count_is_the_constant_less_the_start():
    assert loops_of(read_module(MODULE)) == {"loop": 7}


def test_arguments_are_read():
    weight, batch = arguments_of(read_module(MODULE))
    assert (weight.path, weight.kind, weight.global_dims) == ("params['w']", PeakKind.PARAMETERS, (8, 8))
    assert batch.kind is PeakKind.BATCH


def test_all_reduce_of_a_padded_shard_is_a_weight_gather():
    module = read_module(MODULE)
    (found,) = collectives_of(module, tuple(executions(module)))
    assert (found.meaning, found.parameter, found.count) == (CollectiveMeaning.WEIGHT_GATHER, "params['w']", 7)
    assert (found.payload_bytes, found.wire_bytes, found.group_size) == (256, 384, 4)


KERNEL = """%kernel = f32[8,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", attributes={
"text":"{ } = ("
}}, metadata={op_name="splash"}
  ROOT %out ="""


def test_instructions_over_several_lines():
    entry = read_module(MODULE.replace("ROOT %out =", KERNEL)).computations["main"]
    assert entry.by_name["kernel"].op_name == "splash"
    assert entry.root == "out"


@pytest.mark.parametrize(("step", "count"), [(1, 7), (2, 4), (7, 1)])
def test_trip_count_heeds_the_step(step, count):
    assert loops_of(read_module(MODULE.replace("%one = s32[] constant(1)", f"%one = s32[] constant({step})"))) == {"loop": count}


def test_dot_flops():
    body = read_module(MODULE).computations["body"]
    assert matmul_flops(body.by_name["product"], body) == 2 * 8 * 8 * 8
    assert matmul_flops(body.by_name["field"], body) == 0


@pytest.mark.parametrize("text", ["", "not HLO", "HloModule cut_off\n"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match=r"HLO text"):
        read_module(text)


def test_assignment_is_read():
    parameter, on_chip, constant, local = read_assignment(ASSIGNMENT)
    assert (parameter.parameter, parameter.is_live_out, parameter.size_bytes) == (0, True, 64)
    assert (on_chip.color, on_chip.is_temp, on_chip.size_bytes) == (1, True, 512)
    assert on_chip.values[0].key == ("loop", "1")
    assert on_chip.values[0].offset_bytes == 256
    assert (constant.is_constant, local.is_thread_local) == (True, True)


def test_live_ranges_are_read():
    live = read_live_ranges(LIVE)
    assert live.schedule == ("w", "loop", "out")
    assert live.ranges == {("w", ""): (0, 2), ("loop", "1"): (1, 2)}


def test_missing_dump_says_what_to_do(tmp_path):
    with pytest.raises(DumpError, match="xla_dump_hlo_as_text=True"):
        read_dump(tmp_path)


def test_tuples_of_tuples():
    shape = "((bf16[4,2]{1,0:T(8,128)(2,1)S(1)}, s32[]), f32[3]{0}, u32[]{:S(2)})"
    assert element_of(shape, 0) == "(bf16[4,2]{1,0:T(8,128)(2,1)S(1)}, s32[])"
    assert [array.num_bytes for array in arrays_of(shape)] == [16, 4, 12, 4]
    assert [array.memory_space for array in arrays_of(shape)] == [1, 0, 0, 2]


values = st.builds(
    lambda start, length, offset, size: (start, min(9, start + length), offset, size),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 30),
    st.integers(1, 12),
)


@given(st.lists(values, max_size=8))
def test_covered_bytes_against_brute_force(lives):
    found = covered_bytes(
        [
            LiveValue(
                value=AssignedValue(key=(str(at), ""), size_bytes=size, offset_bytes=offset, shape="u8[1]"),
                offset_bytes=offset,
                start=start,
                end=end,
            )
            for at, (start, end, offset, size) in enumerate(lives)
        ],
        num_points=10,
    )
    for point in range(10):
        covered = {byte for start, end, offset, size in lives if start <= point <= end for byte in range(offset, offset + size)}
        assert found[point] == len(covered)


@given(
    lhs=st.integers(1, 9),
    size=st.integers(1, 6),
    stride=st.integers(1, 4),
    pad=st.integers(0, 5),
    dilate=st.integers(1, 4),
    spread=st.integers(1, 3),
)
def test_valid_positions_against_brute_force(lhs, size, stride, pad, dilate, spread):
    span = (lhs - 1) * dilate + 1 + 2 * pad - (size - 1) * spread - 1
    out = span // stride + 1 if span >= 0 else 0
    window = read_window(f"{{size={size} stride={stride} pad={pad}_{pad} lhs_dilate={dilate} rhs_dilate={spread}}}", num_dims=1)
    elements = {at * dilate for at in range(lhs)}
    hits = sum(position * stride + tap * spread - pad in elements for position, tap in itertools.product(range(out), range(size)))
    assert valid_positions(lhs, out, window=window, dim=0) == hits


def test_padded_matmul_of_tpu_counts_valid_positions_only():
    # A projection to 8 heads as TPU writes it: the window slides over the heads, seven of eight taps meet padding.
    text = MODULE.replace(
        "%product = f32[8,8]{1,0} dot(%carry#1, %gathered), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "%lhs = bf16[8,1024,64,1]{3,2,1,0} constant(0)\n"
        "  %rhs = bf16[64,8,128,1]{3,2,1,0} constant(0)\n"
        "  %heads = bf16[8,1024,8,128]{3,1,2,0} convolution(%lhs, %rhs), window={size=1x8 pad=0_0x7_7 rhs_reversal=0x1}, "
        "dim_labels=0bf1_i1o0->0b1f\n"
        "  %product = f32[8,8]{1,0} copy(%gathered)",
    )
    body = read_module(text).computations["body"]
    assert matmul_flops(body.by_name["heads"], body) == 2 * 8 * 1024 * 64 * 8 * 128


TOTALS = SpaceTotals(
    space=Space.DEVICE, argument_bytes=1000, output_bytes=600, alias_bytes=500, arena_bytes=10**6, live_bytes=990000
)


def compiler(**changed: int) -> MemoryBytes:
    return MemoryBytes(**{"argument_bytes": 1000, "output_bytes": 600, "alias_bytes": 500, "temp_bytes": 10**6} | changed)


def test_reserved_bytes_are_a_class_of_their_own():
    totals, notes = check_totals(TOTALS, compiler(temp_bytes=10**6 + 16352))
    assert (totals.reserved_bytes, totals.total_bytes, notes) == (16352, 1000 + 100 + 10**6 + 16352, ())


@pytest.mark.parametrize(
    "changed",
    [{"argument_bytes": 1001}, {"output_bytes": 599}, {"alias_bytes": 0}, {"temp_bytes": 10**6 - 1}, {"temp_bytes": 2 * 10**6}],
)
def test_disagreement_is_an_error(changed):
    with pytest.raises(DumpError, match=rf"{next(iter(changed))}: the buffer assignment has"):
        check_totals(TOTALS, compiler(**changed))


def test_fragmentation_that_libtpu_counts_twice_is_told():
    totals, notes = check_totals(TOTALS, compiler(temp_bytes=2 * 10**6), peak_memory_bytes=1000 + 100 + 990000)
    assert totals.reserved_bytes == 0
    assert "fragmentation" in notes[0]
    with pytest.raises(DumpError, match="temp_bytes"):
        check_totals(TOTALS, compiler(temp_bytes=2 * 10**6), peak_memory_bytes=2 * 10**6)
    assert check_totals(TOTALS, compiler(temp_bytes=2 * 10**6), peak_memory_bytes=2 * 10**6, elsewhere=10**6) == (totals, notes)


def test_bytes_of_narrow_types():
    assert [array.num_bytes for array in arrays_of("(s4[7], pred[3], f8e4m3fn[5], c64[2])")] == [math.ceil(3.5), 3, 5, 16]
