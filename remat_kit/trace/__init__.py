"""A step as traced by JAX, before any compiler: its graph of operations, FLOPs, names, kernels, residuals and recomputation."""

from remat_kit.trace.residuals import report_graph, residual_report, residuals
from remat_kit.trace.step import graph_of, summarise, trace_graph, trace_step

__all__ = ["graph_of", "report_graph", "residual_report", "residuals", "summarise", "trace_graph", "trace_step"]
