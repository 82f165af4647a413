"""A request's wishes -> the engine's parameters."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from app.errors import InvalidRequest
from app.schema import NO_NVEXT
from models.sampling import SamplingParams

if TYPE_CHECKING:
    from app.gateway import Gateway
    from app.schema import TurnRequest
    from models.grammar import Grammar
    from models.rendering import Rendered

LEAST_TOP_P = 1e-6
"""What `top_p: 0` means: the most likely token alone."""


NEVER = -1e4
"""A bias that no logit outweighs."""


def sampling_of(
    gateway: Gateway,
    request: TurnRequest,
    limit: int,
    rendered: Rendered | None = None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """The request's parameters over the model's own defaults; without a seed, one nobody can guess.

    `rendered` is the prompt, which says what of the answer must be seen, and whether it may call tools.

    Raises:
        InvalidRequest: a token id in `logit_bias` is none of the model's.
    """
    defaults, nvext = gateway.defaults, request.nvext or NO_NVEXT
    top_p = defaults.top_p if request.top_p is None else max(request.top_p, LEAST_TOP_P)
    wanted_k = nvext.top_k if request.top_k is None else request.top_k
    repetition = request.repetition_penalty if request.repetition_penalty is not None else nvext.repetition_penalty
    return SamplingParams(
        temperature=_either(request.temperature, defaults.temperature),
        top_p=top_p,
        top_k=defaults.top_k if wanted_k is None else max(wanted_k, 0),
        min_p=_either(request.min_p, defaults.min_p),
        repetition_penalty=_either(repetition, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=(*_biases(gateway, request), *_no_calls(gateway, rendered)),
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        max_new_tokens=limit,
        min_tokens=request.min_tokens or 0,
        stop=tuple(request.stop or ()),
        ignore_eos=bool(nvext.ignore_eos if request.ignore_eos is None else request.ignore_eos),
        top_logprobs=request.told_logprobs,
        prompt_logprobs=request.wants_prompt_logprobs,
        visible_ids=frozenset() if rendered is None else gateway.chat.visible_ids(rendered),
        grammar=grammar,
    )


def _no_calls(gateway: Gateway, rendered: Rendered | None) -> tuple[tuple[int, float], ...]:
    """Where tools are described and none may be called: the tokens that would open a call, if single ones do."""
    if rendered is None or not rendered.tools or rendered.reads_calls:
        return ()
    return tuple((token_id, NEVER) for token_id in gateway.chat.call_ids())


def _biases(gateway: Gateway, request: TurnRequest) -> tuple[tuple[int, float], ...]:
    biases = tuple((int(token_id), bias) for token_id, bias in (request.logit_bias or {}).items())
    most = gateway.chat.names.num_tokens
    for token_id, _ in biases:
        if token_id >= most:
            message = f"'logit_bias' names token {token_id}, and this model's ids are below {most}."
            raise InvalidRequest(message, "logit_bias", "invalid_value")
    return biases


def _either(wish: float | None, default: float) -> float:
    return default if wish is None else wish
