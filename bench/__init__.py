"""Figures of a machine and a server: `python -m bench --help`. Not part of the wheel.

machine      what the hardware does by itself, so that figures of two machines can be compared
words        prompts of a wanted length that share nothing
client       one streamed answer over HTTP, with the time of every piece
chat         decode, prefill, warm turns and parallel streams of any OpenAI-compatible server
server       `dormouse serve` as a process of its own
steps        what serving over HTTP costs the engine's steps
step_client  the other side of `steps`, in a process of its own
sessions     many conversations over HTTP: does each find its history? Run and shown by the two after it
sessions_run, sessions_report
progress     how far a benchmark is
tiers/       what sleeping sessions cost and save, without HTTP
stats        medians with their spread; the bootstrap
report       tables for people, JSON for programs
"""
