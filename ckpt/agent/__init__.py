"""The agent: a process beside the trainers of one node that writes staged saves, and goes on when a trainer dies.

`client` is the trainer's end: it starts the agent, hands a staged state over and waits for the outcome. `server` is the
agent itself: one thread for each local rank runs the ordinary save pipeline of `ckpt.engine` on staged memory. These
threads are a group of ranks (`peers`) over connections of their own (`wire`), to each other and to the agents of other
nodes: no trainer is needed once all have staged.
"""
