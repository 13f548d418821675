"""`python -m ckpt.agent TRAINERS OTHERS STARTER`: how a Checkpointer starts an agent."""

import sys

from ckpt.agent.server import main

if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
