"""From a request to a turn that is ready to run: whose it is, its exact tokens, its branch, its parameters.

    thread   render, then encode: spliced from what the session already ran (models/chat.py)
    loop     find the session, begin the turn on the branch that the tokens continue

Templates and tokenizers take milliseconds on long prompts, which on the event loop would delay every stream.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from app import sessions
from app.report import Standing
from app.sse import Head
from app.turns import Turn
from kvstore import chain
from kvstore.types import TurnSpec
from models.sampling import SamplingParams

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping

    from app.gateway import Gateway
    from app.schema import ChatRequest
    from app.sessions import SessionName
    from kvstore.sessions import OpenTurn
    from models.chat import Divergence, Encoded
    from models.rendering import Rendered

TENANT = ""
"""The only one, until keys tell callers apart."""

LEAST_TOP_P = 1e-6
"""What `top_p: 0` means: the most likely token alone."""


async def prepare(gateway: Gateway, request: ChatRequest, headers: Mapping[str, str]) -> Turn:
    """A turn on its branch. Whoever gets it must close it: the branch is busy until then.

    Raises:
        ModelNotFound: the request names another model.
        TemplateFailed: the model's template refuses the messages.
    """
    arrived = time.monotonic()
    gateway.names.check(request.model)
    name = sessions.session_name(request, headers, gateway.settings.session_header)
    scope = scope_of(request)
    rendered = await gateway.in_thread(gateway.chat.render, [message.as_template() for message in request.messages])
    name = _resolved(gateway, name, scope, rendered, request.prompt_cache_key)
    assert name.id is not None
    histories = gateway.book.histories(scope, name.id)
    encoded = await gateway.in_thread(gateway.chat.encode, rendered, histories)
    # No await from here on: what begins on the branch is what is handed to the caller.
    place = gateway.book.begin(
        scope,
        name.id,
        encoded.token_ids,
        arrived,
        parent_id=name.parent_id,
        group=request.prompt_cache_key,
        priority=request.priority or 0,
    )
    try:
        return Turn(
            gateway,
            Head(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), request.model, gateway.system_fingerprint),
            _standing(gateway, request, name, encoded, place),
            spec_of(gateway, request, encoded.token_ids),
            place,
            rendered,
            encoded,
            arrived,
        )
    except BaseException:
        gateway.book.abandon(place)
        raise


def scope_of(request: ChatRequest) -> str:
    """Whose sessions a request can meet: like K/V, neither ids nor texts are seen across salts."""
    return TENANT if request.cache_salt is None else f"{TENANT}\0{request.cache_salt}"


def _resolved(gateway: Gateway, name: SessionName, scope: str, rendered: Rendered, group: str | None) -> SessionName:
    """A request without an id continues the session whose text it continues, or begins a new one."""
    if name.id is not None:
        return name
    found = gateway.book.find(scope, rendered.digests, parent_id=name.parent_id, group=group)
    if found is not None:
        return sessions.SessionName(found.id, sessions.BY_TEXT, name.parent_id)
    return sessions.SessionName(sessions.new_session_id(), sessions.NEW, name.parent_id)


def _standing(gateway: Gateway, request: ChatRequest, name: SessionName, encoded: Encoded, place: OpenTurn) -> Standing:
    match = place.match
    return Standing(
        session_id=place.session.id,
        id_source=name.source,
        parent_id=name.parent_id or place.session.parent_id,
        branch=place.branch.index,
        turn=place.number,
        prompt_tokens=len(encoded.token_ids),
        history_tokens=match.history_tokens,
        shared_tokens=match.shared_tokens,
        is_known_session=match.is_known_session,
        block_tokens=gateway.block_tokens,
        cache=_may_cache(request),
        divergence=_divergence(gateway, encoded, place),
    )


def _divergence(gateway: Gateway, encoded: Encoded, place: OpenTurn) -> Divergence | None:
    match = place.match
    if match.branch is None or match.shared_tokens == match.history_tokens:
        return None
    return gateway.chat.diverge(encoded, match.branch.history, match.shared_tokens)


def _may_cache(request: ChatRequest) -> bool:
    return request.cache_prompt is not False


def spec_of(gateway: Gateway, request: ChatRequest, token_ids: array[int]) -> TurnSpec:
    """What the turn asks of the store and the engine; an output limit is cut to what the context leaves."""
    left = max(0, gateway.max_context - len(token_ids))
    limit = left if request.output_limit is None else min(request.output_limit, left)
    return TurnSpec(
        token_ids=token_ids,
        max_new_tokens=limit,
        namespace=chain.namespace(gateway.model_key, TENANT, request.cache_salt),
        payload=sampling_of(gateway, request, limit),
        priority=request.priority or 0,
        cache=_may_cache(request),
    )


def sampling_of(gateway: Gateway, request: ChatRequest, limit: int) -> SamplingParams:
    """The request's parameters over the model's own defaults; without a seed, one nobody can guess."""
    defaults = gateway.defaults
    top_p = defaults.top_p if request.top_p is None else max(request.top_p, LEAST_TOP_P)
    top_k = defaults.top_k if request.top_k is None else max(request.top_k, 0)
    return SamplingParams(
        temperature=_either(request.temperature, defaults.temperature),
        top_p=top_p,
        top_k=top_k,
        min_p=_either(request.min_p, defaults.min_p),
        repetition_penalty=_either(request.repetition_penalty, defaults.repetition_penalty),
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        max_new_tokens=limit,
        min_tokens=request.min_tokens or 0,
        stop=tuple(request.stop or ()),
        ignore_eos=bool(request.ignore_eos),
    )


def _either(wish: float | None, default: float) -> float:
    return default if wish is None else wish
