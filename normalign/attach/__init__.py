"""Aligners on models of other people: attach one, watch it while it trains, take it off again."""

from normalign.attach.attach import attach_aligner, detach_aligner
from normalign.attach.watch import NormWatch

__all__ = ["NormWatch", "attach_aligner", "detach_aligner"]
