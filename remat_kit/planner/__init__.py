"""The core of `plan`: which values each layer saves, offloads or recomputes, and in how many layers, under a budget. No JAX.

`blocks` describes a layer, `choices` lists its worthwhile policies, `mixture` spreads them over the layers of the stacks,
`model` predicts a step's bytes from few measurements, `search` measures and corrects until the plan holds, `explain` words it.
Nothing here compiles: `search` is handed a `measure` callable. `from_trace` makes blocks of a traced step.
"""
