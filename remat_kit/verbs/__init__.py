"""The questions a person asks: `compare` and, inside the worker process, `measure`. The only place that joins stages."""
