"""Scripts that measure what the documentation claims; each prints its numbers and returns 1 where a bound is missed."""
