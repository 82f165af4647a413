"""Errors of the models package.

ModelError
├── ModelUnavailable    stops start-up: the files could not be had; says what to do
├── UnsupportedModel    stops start-up: this architecture would give wrong answers here
├── KernelsUnavailable  stops start-up: compiled code was asked for and cannot be had
├── TemplateMissing     stops start-up: the tokenizer has no chat template
├── TemplateFailed      400: the chat template refused these messages
└── GrammarRefused      400: a schema, pattern or grammar that answers cannot be held to
"""

from __future__ import annotations


class ModelError(Exception):
    """Root of the errors of models."""


class ModelUnavailable(ModelError):
    """The files of `source` could not be had; the message says what to do."""

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(f"{source}: {problem}")
        self.source = source


class UnsupportedModel(ModelError):
    """A model of `model_type` would answer wrongly, or not at all, for `reason`."""

    def __init__(self, model_type: str, reason: str) -> None:
        super().__init__(f"models of type {model_type!r} are not supported: {reason}")
        self.model_type = model_type
        self.reason = reason


class KernelsUnavailable(ModelError):
    """`--compile on`, and the kernels cannot compute this model on this machine for `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"--compile on cannot be had: {reason}; --compile auto goes on without")
        self.reason = reason


class TemplateMissing(ModelError):
    """The tokenizer brings no chat template, so messages cannot become a prompt."""


class TemplateFailed(ModelError):
    """The chat template refused the messages, or what was passed to it; the message is its own."""


class GrammarRefused(ModelError):
    """Answers cannot be held to this schema, pattern or grammar; the message says to what of it."""
