"""A step as traced by JAX, before any compiler: its graph of operations, FLOPs, names and kernels."""

from remat_kit.trace.step import graph_of, summarise, trace_graph, trace_step

__all__ = ["graph_of", "summarise", "trace_graph", "trace_step"]
