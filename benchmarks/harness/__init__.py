"""How a run goes: what is right, what is compiled ahead and where, how a call is timed, and the CSV of it all."""
