"""From a factory, a plan and option texts to a checked `Step`.

In: a factory, the target's devices, a `Plan`, option texts. Out: a step whose every argument has a place on those devices.
Everything that a user can get wrong in a step is said here, by name: options, stacks, counts, presets, names of values.
"""

import dataclasses
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from remat_kit.errors import FactoryError, PolicyError, RematKitError, StepError, nearest
from remat_kit.plans import NO_REMAT, Plan, Policies, bind
from remat_kit.policy import matches, patterns
from remat_kit.presets import resolve_stack
from remat_kit.records import StepTrace
from remat_kit.step import Step

Factory = Callable[..., object]


def read_options(factory: Factory, texts: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Reads option texts by the annotations of the factory.

    Args:
        factory: `f(policies, devices, *, batch: int = 8, …)`.
        texts: Pairs of option and text.

    Returns:
        Option -> value.

    Raises:
        StepError: An unknown option, or a text that is not of the option's type.
    """
    allowed = _options(factory)
    takes_any = any(kind is inspect.Parameter.VAR_KEYWORD for kind in _kinds_of_parameters(factory))
    values = {}
    for name, text in texts:
        if name not in allowed and takes_any:
            allowed[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        if name not in allowed:
            listing = ", ".join(allowed) or "none"
            raise StepError(f"the step has no option {name!r}; its options: {listing}.{nearest(name, allowed)}")
        values[name] = _read(name, text, allowed[name])
    return values


def build(factory: Factory, policies: Policies, devices: Sequence[jax.Device], options: Mapping[str, Any]) -> Step:
    """Calls the factory and places its arguments.

    Raises:
        FactoryError: The factory raised an error of its own.
        StepError: It did not return a `Step`, or arguments without shardings are meant for several devices.
    """
    try:
        step = factory(policies, list(devices), **options)
    except RematKitError:
        raise
    except Exception as error:
        raise factory_error("the step factory raised", error) from error
    if not isinstance(step, Step):
        raise StepError(f"the step factory returned {type(step).__name__}; it must return a remat_kit.Step.")
    return _place(step, devices)


def bind_plan(plan: Plan, step: Step) -> Policies:
    """Fits a plan to the step's stacks and resolves its presets.

    Raises:
        PolicyError: A stack, a count, a preset or a mix that the step can't take.
    """
    if not step.stacks:
        if plan.parts == ((None, NO_REMAT["every stack"]),):
            return NO_REMAT
        raise PolicyError(f"{str(plan)!r}: the step declares no stack. Add stacks=(Stack(name=…, num_layers=…),) to its Step.")
    policies = bind(plan, {stack.name: stack.num_layers for stack in step.stacks})
    for stack in step.stacks:
        if policies[stack.name].is_mixed and not stack.accepts_mixed:
            raise PolicyError(
                f"stack {stack.name!r} can't mix policies ({policies[stack.name]}). Apply its plan with remat_kit.stack and add "
                "accepts_mixed=True to its Stack."
            )
    return Policies(tuple((stack.name, resolve_stack(policies[stack.name], stack.roles)) for stack in step.stacks))


def check_names(plan: Plan, *traces: StepTrace) -> None:
    """Checks that every name and pattern a user wrote exists in the traced step.

    Raises:
        PolicyError: One matches nothing; the message lists the names there are and the near miss.
    """
    names = list(dict.fromkeys(value.name for trace in traces for value in trace.names))
    for policy in plan.policies:
        for pattern in patterns(policy):
            if not any(matches(pattern, name) for name in names):
                listing = ", ".join(names) or "none: name values with jax.ad_checkpoint.checkpoint_name"
                raise PolicyError(
                    f"{str(policy)!r}: no value is named {pattern!r}. Names in the step: {listing}.{nearest(pattern, names)}"
                )


def _kinds_of_parameters(factory: Factory) -> list[Any]:
    return [parameter.kind for parameter in inspect.signature(factory).parameters.values()]


def _options(factory: Factory) -> dict[str, inspect.Parameter]:
    parameters = list(inspect.signature(factory, eval_str=True).parameters.values())[2:]
    skipped = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
    return {parameter.name: parameter for parameter in parameters if parameter.kind not in skipped}


def _read(name: str, text: str, parameter: inspect.Parameter) -> Any:
    kinds = _kinds(parameter)
    if (type(None) in kinds or parameter.default is None) and text.lower() == "none":
        return None
    for kind in (bool, int, float, str):
        if kind in kinds:
            try:
                return _READERS[kind](text)
            except ValueError:
                continue
    wanted = " or ".join(kind.__name__ for kind in kinds)
    raise StepError(f"option {name}={text!r} is not of type {wanted}, like {name}={parameter.default!r}.")


def _kinds(parameter: inspect.Parameter) -> tuple[type, ...]:
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        known = parameter.default not in (inspect.Parameter.empty, None)
        return (type(parameter.default),) if known else (int, float, str)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(kind for kind in typing.get_args(annotation) if isinstance(kind, type))
    if typing.get_origin(annotation) is typing.Literal:
        return (str,)
    return (annotation,) if isinstance(annotation, type) else (str,)


def _read_bool(text: str) -> bool:
    words = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


_READERS: Mapping[type, Callable[[str], Any]] = {bool: _read_bool, int: int, float: float, str: str}


def _place(step: Step, devices: Sequence[jax.Device]) -> Step:
    leaves = jax.tree.leaves(step.args)
    for leaf in leaves:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise StepError(f"the step's args hold {leaf!r}: every leaf must be a jax.ShapeDtypeStruct or an array.")
    if all(getattr(leaf, "sharding", None) is not None for leaf in leaves):
        return _check_devices(step, devices)
    if len(devices) > 1:
        raise StepError(
            f"the step's arguments have no shardings, and the target has {len(devices)} devices: give each "
            "jax.ShapeDtypeStruct a sharding over them."
        )
    here = SingleDeviceSharding(devices[0])
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), step.args)
    return dataclasses.replace(step, args=args)


def _check_devices(step: Step, devices: Sequence[jax.Device]) -> Step:
    allowed = set(devices)
    for leaf in jax.tree.leaves(step.args):
        if not leaf.sharding.device_set <= allowed:
            raise StepError(
                "the step's arguments live on other devices than the factory was given: build the mesh from `devices`."
            )
    return step


def factory_error(what: str, error: Exception) -> FactoryError:
    """An error of the user's code, with its last own frame."""
    return FactoryError(f"{what} {type(error).__name__}: {error}{_last_frame(error)}")


def _last_frame(error: Exception) -> str:
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    own = [frame for frame in frames if "site-packages" not in frame.filename and "remat_kit" not in frame.filename]
    if not own:
        return ""
    frame = own[-1]
    return f" ({os.path.relpath(frame.filename)}:{frame.lineno}, in {frame.function})"
