"""A policy onto code: functions, Linen modules, stacks of layers. In: `Policy` records; out: callables and module classes."""
