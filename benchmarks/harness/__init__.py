"""How a run goes: what is right, what is compiled ahead and in which processes, and how a call is timed."""
