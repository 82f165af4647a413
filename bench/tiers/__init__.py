"""What sleeping sessions cost and save, in one process and without HTTP: `dormouse bench tiers --help`.

rig         the store and the engine that `dormouse serve` runs, over one loaded model, with budgets in slots
sessions    histories that share nothing, and how much of one a turn could reuse
restore     how long a prefix takes from DRAM and from NVMe, and to compute it again, against its length
over_http   the same asked of a running server, over HTTP
wake        how long a session takes from DRAM to HBM, and how long to compute it again
decode      what decoding loses while other sessions are copied
rss         resident memory and DRAM's slots over many cycles of sleep and wake
long        many long sessions on little HBM: does each resume with only its tail computed again?
many        random turns of many sessions, several at once: does each find its history?
choice      which of these to run, with which sizes
tables      how their results look
"""
