"""Figures of a machine and of servers: `dormouse bench --help`, or `python -m bench` in a checkout.

cli, commands/, options
             the command line; what a command needs is imported when it runs
machine      what the hardware does by itself, so that figures of two machines can be compared
words        prompts that share nothing
lengths      how many words make a prompt of a wanted length
client       one streamed answer over HTTP, with the time of every piece
chat         decode, prefill, warm turns and parallel streams of any OpenAI-compatible server
server       a server as a process of its own: ours, or another
in_process   a gateway behind uvicorn in this process
steps        what serving over HTTP costs the engine's steps
step_client  the other side of `steps` and `gateway`, in a process of its own
sessions     many conversations over HTTP: does each find its history? Run and shown by the two after it
sessions_run, sessions_report
trace, replay, replay_run, replay_report
             traffic of the past at its own pace; make_traces made what is in traces/
gateway_engine, gateway_run, gateway_report
             HTTP and store alone, with a stand-in for the engine
peers/       us and other servers in turns; convert_weights gives them the same weights
tiers/       what sleeping sessions cost and save
nvme         blocks to files and back, beside fio
progress     how far a benchmark is
stats        medians with their spread; the bootstrap
report       tables for people, JSON for programs
compare      ratios of two runs
plots        PNGs of one

planner_scale and returns are scripts of their own, about the planner under a virtual clock.
"""
