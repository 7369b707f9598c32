"""The studio: a local page where a user changes a job and sees the answer at once. Every figure is the engine's.

`choices` says what may be changed and what Megatron would refuse, `session` runs what the page asks for, `results` draws it
with the report's own charts, `export` gives it back, `gate` keeps everybody else out, `app` is the web server.
"""
