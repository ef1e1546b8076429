"""The `plan` verb: `settings` reads what is asked, `blocks` (in the worker) describes the step, `planned` joins the stages.

`session` compiles; `frontier` and `largest` are the two other questions, `ways` what would help where nothing fits.
"""
