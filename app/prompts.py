"""From a request to a turn that is ready to run: whose it is, its exact tokens, its branch, its parameters.

    loop     wake the session, if it is named and asleep
    thread   read what it said, where that lies on disk since before the server started
    thread   render, then encode: spliced from what the session already ran (models/chat.py)
    loop     find the session, begin the turn on the branch that the tokens continue

Templates and tokenizers take milliseconds on long prompts, which on the event loop would delay every stream.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from app import scopes, sessions
from app.report import Standing
from app.sse import Head
from app.turns import Turn
from kvstore import chain
from kvstore.former import Gone
from kvstore.history import History
from kvstore.reuse import MissReason
from kvstore.types import Tier, TurnSpec
from models.sampling import SamplingParams

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping

    from app.gateway import Gateway
    from app.schema import ChatRequest
    from app.sessions import SessionName
    from app.store import Wake
    from kvstore.session import OpenTurn
    from models.chat import Divergence, Encoded
    from models.rendering import Rendered

LEAST_TOP_P = 1e-6
"""What `top_p: 0` means: the most likely token alone."""

WHY_GONE = {
    Gone.DELETED: MissReason.NEW_SESSION,  # its client wanted it gone, and begins anew
    Gone.EXPIRED: MissReason.EXPIRED,
    Gone.EVICTED: MissReason.EVICTED,
    Gone.LOST: MissReason.CATALOG_LOST,
    Gone.CORRUPT: MissReason.CORRUPT,
    Gone.OTHER_MODEL: MissReason.MODEL_CHANGED,
}


async def prepare(gateway: Gateway, request: ChatRequest, headers: Mapping[str, str]) -> Turn:
    """A turn on its branch. Whoever gets it must close it: the branch is busy until then.

    Raises:
        ModelNotFound: the request names another model.
        TemplateFailed: the model's template refuses the messages.
    """
    arrived = time.monotonic()
    gateway.names.check(request.model)
    gateway.keeper.expire()
    name = sessions.session_name(request, headers, gateway.settings.session_header)
    scope = scopes.scope(request.cache_salt)
    # Before anything that takes time: a sleeping cache is on its way while the prompt is rendered and tokenized.
    wake = wake_on_arrival(gateway, request, scope, name)
    try:
        rendered = await gateway.in_thread(gateway.chat.render, [message.as_template() for message in request.messages])
        if name.id is None:
            name = _resolved(gateway, name, scope, rendered, request.prompt_cache_key)
            wake = wake_on_arrival(gateway, request, scope, name)
        assert name.id is not None
        await gateway.keeper.recall(scope, name.id)
        histories = gateway.book.histories(scope, name.id)
        encoded = await gateway.in_thread(gateway.chat.encode, rendered, histories)
        # No await from here on: what begins on the branch is what is handed to the caller.
        return _begun(gateway, request, scope, name, rendered, encoded, wake, arrived)
    except BaseException:
        if wake is not None:
            wake.cancel()
        raise


def wake_on_arrival(gateway: Gateway, request: ChatRequest, scope: str, name: SessionName) -> Wake | None:
    """Begin to wake the branch that the request most likely continues.

    Which it is the tokens will say; the turn carries the wake's id, and past the place where its prompt
    diverges from this branch nothing more is loaded.
    """
    session = gateway.book.get(scope, name.id) if name.id is not None and _may_cache(request) else None
    branch = session.latest if session is not None else None
    if branch is None or not branch.keys:
        return None
    return gateway.store.wake(branch.block_keys, Tier.HBM, gateway.settings.wake_deadline_seconds)


def _begun(
    gateway: Gateway,
    request: ChatRequest,
    scope: str,
    name: SessionName,
    rendered: Rendered,
    encoded: Encoded,
    wake: Wake | None,
    arrived: float,
) -> Turn:
    assert name.id is not None
    place = gateway.keeper.begin(
        scope,
        name.id,
        encoded.token_ids,
        parent_id=name.parent_id,
        group=request.prompt_cache_key,
        wishes=request.wishes,
    )
    try:
        return Turn(
            gateway,
            Head(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), request.model, gateway.system_fingerprint),
            _standing(gateway, request, name, encoded, place),
            spec_of(gateway, request, encoded.token_ids, place.terms.priority, wake),
            place,
            rendered,
            encoded,
            wake,
            arrived,
        )
    except BaseException:
        gateway.keeper.abandon(place)
        raise


def _resolved(gateway: Gateway, name: SessionName, scope: str, rendered: Rendered, group: str | None) -> SessionName:
    """A request without an id continues the session whose text it continues, or begins a new one."""
    found = gateway.book.find(scope, rendered.digests, parent_id=name.parent_id, group=group)
    if found is not None:
        return sessions.SessionName(found.id, sessions.BY_TEXT, name.parent_id)
    return sessions.SessionName(sessions.new_session_id(), sessions.NEW, name.parent_id)


def _standing(gateway: Gateway, request: ChatRequest, name: SessionName, encoded: Encoded, place: OpenTurn) -> Standing:
    match = place.match
    written = None if match.branch is None else match.branch.written_blocks
    return Standing(
        session_id=place.session.id,
        id_source=name.source,
        parent_id=name.parent_id or place.session.parent_id,
        branch=place.branch.index,
        turn=place.number,
        prompt_tokens=len(encoded.token_ids),
        history_tokens=match.history_tokens,
        shared_tokens=match.shared_tokens,
        is_known_session=match.is_known_session and not match.has_unread,
        block_tokens=gateway.block_tokens,
        cache=_may_cache(request),
        divergence=_divergence(gateway, encoded, place),
        gone=_why_gone(gateway, request, place),
        written_tokens=None if written is None else written * gateway.block_tokens,
    )


def _why_gone(gateway: Gateway, request: ChatRequest, place: OpenTurn) -> MissReason:
    """Why a session that is not known has no history, or none that can be looked at."""
    if place.match.has_unread:
        return MissReason.LOAD_FAILED
    if place.former is not None:
        return WHY_GONE[place.former.why]
    goes_on = any(message.role == "assistant" for message in request.messages)
    # The earlier process's sessions are not known by name any more: one that goes on may have been among them.
    return gateway.keeper.lost if goes_on and gateway.keeper.lost is not None else MissReason.NEW_SESSION


def _divergence(gateway: Gateway, encoded: Encoded, place: OpenTurn) -> Divergence | None:
    match = place.match
    if match.branch is None or match.shared_tokens == match.history_tokens:
        return None
    history = match.branch.history
    assert isinstance(history, History), "a branch is matched by its ids"
    return gateway.chat.diverge(encoded, history, match.shared_tokens)


def _may_cache(request: ChatRequest) -> bool:
    return request.cache_prompt is not False


def spec_of(
    gateway: Gateway, request: ChatRequest, token_ids: array[int], priority: int = 0, wake: Wake | None = None
) -> TurnSpec:
    """What the turn asks of the store and the engine; an output limit is cut to what the context leaves."""
    left = max(0, gateway.max_context - len(token_ids))
    limit = left if request.output_limit is None else min(request.output_limit, left)
    return TurnSpec(
        token_ids=token_ids,
        max_new_tokens=limit,
        namespace=chain.namespace(gateway.model_key, scopes.TENANT, request.cache_salt),
        payload=sampling_of(gateway, request, limit),
        priority=priority,
        cache=_may_cache(request),
        wake=None if wake is None else wake.id,
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
