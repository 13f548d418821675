"""Hooks for the training loops that people have: one small module for each, thin over `Checkpointer`.

    loop          a plain loop: `for step, batch in ck.steps_of(loader, state): ...`
    megatron      Megatron-LM's save_checkpoint and load_checkpoint, and a checkpoint manager for Megatron Bridge
    transformers  the Trainer of Hugging Face transformers
    lightning     PyTorch Lightning
    titan         loops on FSDP2 in the manner of torchtitan

May import what the trainer may. Each module imports its framework when it is imported itself, so import the one that
you need; this package imports none of them. Start reading at `run.Run`; docs/hooks.md shows each in use.
"""
