"""From a request to turns that are ready to run: whose they are, their exact tokens, branches and parameters.

    loop     wake the session, if it is named and asleep
    thread   read what it said, where that lies on disk since before the server started
    thread   render, then encode: spliced from what the session already ran (models/chat.py)
    loop     find the session, begin the turn on the branch that the tokens continue

Templates and tokenizers take milliseconds on long prompts, which on the event loop would delay every stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app import scopes, sessions
from app.errors import InvalidRequest
from app.exchange import Exchange
from app.report import Standing
from app.sampling import sampling_of
from app.turns import Turn
from app.user_agents import client_name
from kvstore import chain
from kvstore.former import Gone
from kvstore.history import History
from kvstore.reuse import MissReason
from kvstore.terms import Persist
from kvstore.types import Tier, TurnSpec
from models.rendering import Rendered
from models.sampling import SamplingParams

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from app.gateway import Gateway
    from app.schema import TurnRequest
    from app.sessions import SessionName
    from app.store import Wake
    from app.structure import Constrain
    from kvstore.session import OpenTurn
    from models.chat import Divergence, Encoded
    from models.grammar import Grammar

WHY_GONE = {
    Gone.DELETED: MissReason.NEW_SESSION,  # its client wanted it gone, and begins anew
    Gone.EXPIRED: MissReason.EXPIRED,
    Gone.EVICTED: MissReason.EVICTED,
    Gone.LOST: MissReason.CATALOG_LOST,
    Gone.CORRUPT: MissReason.CORRUPT,
    Gone.OTHER_MODEL: MissReason.MODEL_CHANGED,
}


Render = Callable[[], Rendered]
"""Makes a prompt's text; slow, and called off the event loop."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and whose it is."""

    request: TurnRequest
    scope: str
    name: SessionName
    arrived: float
    client: str


async def prepare(
    gateway: Gateway,
    request: TurnRequest,
    headers: Mapping[str, str],
    prompts: Sequence[Render],
    prompt_field: str = "messages",
    constrain: Constrain | None = None,
    name: SessionName | None = None,
) -> Exchange:
    """Turns for each of the prompts, on branches of one session. Whoever gets them must close them.

    `name` is the session where something else than `headers` and the request's own words decides it.

    Raises:
        ModelNotFound: the request names another model.
        TemplateFailed: the model's template refuses the messages.
        InvalidRequest: what is asked of sampling is beyond this model.
    """
    arrived = time.monotonic()
    gateway.names.check(request.model)
    gateway.keeper.expire()
    name = name or sessions.session_name(request, headers, gateway.settings.session_header)
    asked = Asked(request, scopes.scope(request.salt), name, arrived, client_name(headers.get("user-agent")))
    turns: list[Turn] = []
    try:
        for render in prompts:
            leader = await _turn(gateway, asked, render, constrain, choice=len(turns))
            asked = replace(asked, name=replace(asked.name, id=leader.session_id, source=leader.standing.id_source))
            turns += _choices(leader, request.choices)
    except BaseException:
        for turn in turns:
            await turn.close()
        raise
    return Exchange(turns, prompt_field)


async def _turn(gateway: Gateway, asked: Asked, render: Render, constrain: Constrain | None, choice: int) -> Turn:
    request, scope, name = asked.request, asked.scope, asked.name
    # Before anything that takes time: a sleeping cache is on its way while the prompt is rendered and tokenized.
    wake = wake_on_arrival(gateway, request, scope, name)
    try:
        rendered = await gateway.in_thread(render)
        grammar = None if constrain is None else await gateway.in_thread(constrain, rendered)
        if name.id is None:
            name = _resolved(gateway, name, scope, rendered, request.prompt_cache_key)
            wake = wake_on_arrival(gateway, request, scope, name)
        assert name.id is not None
        await gateway.keeper.recall(scope, name.id)
        histories = gateway.book.histories(scope, name.id)
        encoded = await gateway.in_thread(gateway.chat.encode, rendered, histories)
        if not encoded.token_ids:
            raise InvalidRequest("The prompt is empty: it must have at least one token.", "prompt", "invalid_value")
        # No await from here on: what begins on the branch is what is handed to the caller.
        return _begun(gateway, replace(asked, name=name), rendered, encoded, wake, grammar, choice)
    except BaseException:
        if wake is not None:
            wake.cancel()
        raise


def _choices(leader: Turn, choices: int) -> list[Turn]:
    """A turn and as many further answers to its prompt as are wanted, each drawn with a seed of its own."""
    followers = [leader.follower(leader.choice + index, next_seed(leader.spec, index)) for index in range(1, choices)]
    return [leader, *followers]


def next_seed(spec: TurnSpec, index: int) -> TurnSpec:
    """The same wish for choice `index`: its seed is the first one's plus its index, as in vLLM."""
    params = spec.payload
    assert isinstance(params, SamplingParams)
    return replace(spec, payload=replace(params, seed=params.seed + index), wake=None)


def wake_on_arrival(gateway: Gateway, request: TurnRequest, scope: str, name: SessionName) -> Wake | None:
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
    asked: Asked,
    rendered: Rendered,
    encoded: Encoded,
    wake: Wake | None,
    grammar: Grammar | None,
    choice: int,
) -> Turn:
    request, name = asked.request, asked.name
    assert name.id is not None
    place = gateway.keeper.begin(
        asked.scope,
        name.id,
        encoded.token_ids,
        parent_id=name.parent_id,
        group=request.prompt_cache_key,
        wishes=request.wishes,
        digests=rendered.digests,
    )
    try:
        return Turn(
            gateway,
            _standing(gateway, asked, name, rendered, encoded, place),
            spec_of(
                gateway,
                request,
                encoded.token_ids,
                place.terms.priority,
                wake,
                rendered,
                grammar,
                to_nvme=place.terms.persist is Persist.DISK,
            ),
            rendered,
            encoded,
            asked.arrived,
            choice=choice,
            place=place,
            wake=wake,
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


def _standing(
    gateway: Gateway, asked: Asked, name: SessionName, rendered: Rendered, encoded: Encoded, place: OpenTurn
) -> Standing:
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
        cache=_may_cache(asked.request),
        divergence=_divergence(gateway, encoded, place),
        gone=_why_gone(gateway, rendered, place),
        written_tokens=None if written is None else written * gateway.block_tokens,
        client=asked.client,
    )


def _why_gone(gateway: Gateway, rendered: Rendered, place: OpenTurn) -> MissReason:
    """Why a session that is not known has no history, or none that can be looked at."""
    if place.match.has_unread:
        return MissReason.LOAD_FAILED
    if place.former is not None:
        return WHY_GONE[place.former.why]
    goes_on = bool(rendered.digests)  # there are answers in it
    # The earlier process's sessions are not known by name any more: one that goes on may have been among them.
    return gateway.keeper.lost if goes_on and gateway.keeper.lost is not None else MissReason.NEW_SESSION


def _divergence(gateway: Gateway, encoded: Encoded, place: OpenTurn) -> Divergence | None:
    match = place.match
    if match.branch is None or match.shared_tokens == match.history_tokens:
        return None
    history = match.branch.history
    assert isinstance(history, History), "a branch is matched by its ids"
    return gateway.chat.diverge(encoded, history, match.shared_tokens)


def _may_cache(request: TurnRequest) -> bool:
    # A prompt whose logprobs are wanted is computed whole.
    return request.cache_prompt is not False and not request.wants_prompt_logprobs


def spec_of(
    gateway: Gateway,
    request: TurnRequest,
    token_ids: array[int],
    priority: int = 0,
    wake: Wake | None = None,
    rendered: Rendered | None = None,
    grammar: Grammar | None = None,
    *,
    to_nvme: bool = False,
) -> TurnSpec:
    """What the turn asks of the store and the engine; an output limit is cut to what the context leaves."""
    left = max(0, gateway.max_context - len(token_ids))
    limit = left if request.output_limit is None else min(request.output_limit, left)
    return TurnSpec(
        token_ids=token_ids,
        max_new_tokens=limit,
        namespace=chain.namespace(gateway.model_key, scopes.tenant(), request.salt),
        payload=sampling_of(gateway, request, limit, rendered, grammar),
        priority=priority,
        cache=_may_cache(request),
        wake=None if wake is None else wake.id,
        to_nvme=to_nvme,
        tenant=scopes.tenant(),
    )
