"""Programs that run one system each, started by `bench.program`: a question in a file, an answer in another.

But for this engine's own they import nothing of lmoffload, whose memory would count as theirs, and run under any Python that has the
system.
"""
