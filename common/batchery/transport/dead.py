"""The former name of `batchery.transport.dead_letters`; kept for one version."""

from batchery.transport.dead_letters import DeadLetters

__all__ = ["DeadLetters"]
