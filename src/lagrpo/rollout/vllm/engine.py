"""The rollout engine over vLLM servers, for training and evaluations, of one turn or several.

One group is one request to whichever server is free. The seed of a completion is a function of its
address, so the server does not matter, up to the rounding of other batch shapes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lagrpo.errors import as_settings_error
from lagrpo.model.chat import Chat
from lagrpo.model.model import Policy
from lagrpo.rng import generator
from lagrpo.rollout.base import EngineDefaults, Item, SamplingParams
from lagrpo.rollout.stop import completes_stop, count_until_stop
from lagrpo.rollout.sync_check import ServerCheck
from lagrpo.rollout.vllm.client import Json, SamplerError, VllmClient
from lagrpo.rollout.vllm.group_queue import GroupQueue
from lagrpo.rollout.vllm.nccl_transfer import NcclTransfer
from lagrpo.rollout.vllm.server import StartedServer, wait_until_ready
from lagrpo.rollout.vllm.weights import WeightTransfer, WeightUpdate
from lagrpo.settings.schema import Settings
from lagrpo.tasks.episodes import Episode, Episodes
from lagrpo.threads import run_all, run_together
from lagrpo.types import Completion, Group, Outcome, Request

# vLLM's reason for the end of a request that was stopped.
STOPPED = "abort"
# vLLM writes -9999 for a log-prob of -inf.
NO_LOGPROB = -9000.0


def build_engine(
    settings: Settings,
    policy: Policy,
    servers: Sequence[VllmClient],
    params: SamplingParams,
) -> VllmEngine:
    """Waits until the servers are ready, and returns the engine over them.

    It samples with `params` unless it gets others.

    Raises SettingsError for a server that does not get ready.
    """
    wait_until_ready(servers)
    with as_settings_error("vllm", SamplerError):
        dtype = _coarsest_dtype(servers)
    num_weights = sum(shape.numel() for shape in policy.weights.shapes().values())
    transfer: type[WeightTransfer] = WeightTransfer
    adapted_lm = None
    if policy.weights.adapters:
        adapted_lm = policy.model.lm
    elif settings.vllm.weight_transfer == "nccl":
        transfer = NcclTransfer
    weights = transfer(
        dtype,
        adapted_lm,
        num_bytes=num_weights * dtype.itemsize,
        output_dir=Path(settings.run.output_dir),
    )
    return VllmEngine(
        servers,
        weights,
        policy.chat,
        params,
        seed=settings.run.seed,
        max_num_seqs=settings.rollout.max_num_seqs,
        sleeps=settings.vllm.sleep,
    )


def _coarsest_dtype(servers: Sequence[VllmClient]) -> torch.dtype:
    dtypes: list[torch.dtype] = []
    for server in servers:
        name = server.get_config()["model_config"]["dtype"]
        dtypes.append(getattr(torch, name.removeprefix("torch.")))
    # All servers get the same tensors, so the least precise of their dtypes decides.
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn of the policy in a conversation.

    - `history`: the tokens of the completion before the turn
    - `max_tokens`: the most tokens to sample
    - `seed_key`: the key of the turn's seed, behind the address of the group
    """

    history: Sequence[int]
    max_tokens: int
    seed_key: tuple[int | str, ...] = ()


class VllmEngine(EngineDefaults):
    """A rollout engine that samples from vLLM servers.

    A weight sync stops completions in flight. The engine submits each again with its tokens so far,
    whose keys and values the server then computes with the new weights. So the log-prob of a token
    is the one of its version. With `sleeps`, the servers sleep while the trainer learns.
    """

    evaluates = True

    def __init__(
        self,
        servers: Sequence[VllmClient],
        weights: WeightTransfer,
        chat: Chat,
        params: SamplingParams,
        seed: int = 0,
        max_num_seqs: int = 256,
        *,
        sleeps: bool = False,
    ) -> None:
        self.servers = list(servers)
        self.weights = weights
        self.chat = chat
        self.params = params
        self.seed = seed
        self.sleeps = sleeps
        self._groups = GroupQueue(self.servers, weights.load_current, max_num_seqs)
        # What training samples with. An evaluation may load other weights.
        self._synced: WeightUpdate | None = None
        self._is_asleep = False
        # The groups that weight syncs have stopped: the completions of each, with their tokens so
        # far, by the address of the group.
        self._stopped: dict[tuple[int, int, int], tuple[Request, list[Completion]]] = {}
        self._recomputed = 0  # tokens, since the last `pop_metrics`
        self._lock = threading.Lock()  # for these two

    @property
    def version(self) -> int:
        """The version that all servers report; -1 if one reports other weights."""
        labels = self._groups.ask_all(VllmClient.get_label)
        versions = {self.weights.version_of(label) for label in labels.values()}
        return versions.pop() if len(versions) == 1 else -1

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> dict[str, float]:
        """Loads π_version into all servers. Raises SamplerError if a server cannot load it."""
        self._wake_up()
        update = self.weights.pack(weights.items(), version)
        self._load(update)
        self._synced = update
        self.weights.drop_others(self._groups.servers, update)
        return {}

    @contextmanager
    def temporary_weights(
        self, weights: Mapping[str, Tensor], version: int, *, restore_afterwards: bool
    ) -> Iterator[None]:
        self._wake_up()
        update = self.weights.pack(weights.items(), version)
        if not restore_afterwards:
            self._synced = update
        if update is not self.weights.current:
            self._load(update)
        try:
            yield
        finally:
            if self._synced is not None and self._synced is not self.weights.current:
                self._load(self._synced)
        self.weights.drop_others(self._groups.servers, self.weights.current)

    def current_weights(self) -> tuple[int, Mapping[str, Tensor]]:
        """Returns the version of the last sync and its weights, in the servers' dtype."""
        assert self._synced is not None, "no weights have been synced yet"
        return self._synced.version, self.weights.read(self._synced)

    def sample(
        self, requests: Sequence[Request], G: int, params: SamplingParams | None = None
    ) -> Iterator[tuple[Request, Group]]:
        """Submits a group for each request at once, and returns an iterator of groups as they end.

        An evaluation has its own `params`.
        """
        params = params or self.params
        requests_of_groups: dict[Future[Group], Request] = {}
        for request in requests:
            sample_request = partial(self._sample, request, G=G, params=params)
            requests_of_groups[self._groups.submit(sample_request, G)] = request
        # Not a generator: it submits the requests now, not when a caller reads the first group.
        return self._groups.as_they_end(requests_of_groups)

    def generate_on_servers(
        self, requests: Sequence[Request], G: int, max_tokens: int
    ) -> dict[str, list[Group]]:
        """Returns groups by each server, for the weight-sync check.

        Their sequences leave room for the token that a server must sample to compute log-probs.
        """
        max_tokens = max(1, min(max_tokens, self.params.max_tokens - 1))
        params = replace(self.params, max_tokens=max_tokens, episodes=None)

        def generate(server: VllmClient) -> list[Group]:
            return [self._sample(request, server, G, params) for request in requests]

        groups = self._groups.ask_all(generate)
        return {str(server): groups_of_server for server, groups_of_server in groups.items()}

    def get_logprobs(self, items: Sequence[Item]) -> dict[str, list[list[float]]]:
        """Returns log-probs at temperature 1 by every replica of every server, in nats.

        The keys name the replicas; the lists are [item][token].
        """
        logprobs: dict[str, list[list[float]]] = {}
        for server, logprobs_of_server in self._groups.ask_all(
            partial(_get_logprobs, items)
        ).items():
            for replica, logprobs_of_replica in enumerate(logprobs_of_server):
                is_single = len(logprobs_of_server) == 1
                name = str(server) if is_single else f"{server}, replica {replica}"
                logprobs[name] = logprobs_of_replica
        return logprobs

    def pop_metrics(self) -> dict[str, float]:
        with self._lock:
            recomputed = self._recomputed
            self._recomputed = 0
        metrics = self._groups.pop_metrics()
        if recomputed:
            metrics["recomputed"] = recomputed
        return metrics

    def in_flight(self) -> list[Request]:
        """Returns the groups of one turn that weight syncs have stopped, as of the last sync.

        A resumed run samples what came after it again, and all of the other groups in flight.
        """
        with self._lock:
            return [
                replace(request, begun=tuple(completions))
                for request, completions in self._stopped.values()
            ]

    def close(self) -> None:
        self._groups.close()
        self.weights.close(self._groups.servers)

    def weight_check(self, policy: Policy, requests: Sequence[Request]) -> ServerCheck:
        return ServerCheck(self, requests, self.weights.dtype)

    def keep_logs(self, run: Path) -> None:
        for server in self.servers:
            if isinstance(server, StartedServer) and server.log.is_file():
                number = 1 + len(list(run.glob("vllm-*.log")))  # a resumed run has older ones
                server.log = server.log.rename(run / f"vllm-{number}.log")

    def before_learning(self) -> None:
        if self.sleeps:
            self.sleep()

    def sleep(self) -> None:
        """Frees the servers' GPU memory until the next weight sync or evaluation.

        Everything that was submitted must have come.
        """
        self._groups.ask_all(VllmClient.sleep)
        self._is_asleep = True

    def _wake_up(self) -> None:
        if not self._is_asleep:
            return
        # PyTorch keeps the memory of an update, which the servers need now.
        torch.cuda.empty_cache()
        self._groups.ask_all(VllmClient.wake_up)
        self._is_asleep = False

    def _load(self, update: WeightUpdate) -> None:
        """Loads a version into all servers. If they pause for it, no group starts meanwhile."""
        with self._groups.held() if self.weights.pauses else nullcontext():
            self.weights.send(self._groups, update)
            self.weights.current = update
        if not self.weights.pauses:
            self._groups.ask_all(VllmClient.stop_requests)
        self._groups.take_back()

    def _sample(
        self, request: Request, server: VllmClient, G: int, params: SamplingParams
    ) -> Group:
        """Returns the group of a request, by one server."""
        first_turn = _Turn(history=(), max_tokens=params.max_tokens)
        completions = self._generate(server, request, first_turn, G, params)
        if params.episodes is not None:
            # A thread per completion, because each waits for its own environment and server.
            converse = partial(self._converse, server, request, params, params.episodes)
            completions = run_all(
                [partial(converse, index, first) for index, first in enumerate(completions)]
            )
        return Group(request.prompt, tuple(completions), request.epoch)

    def _converse(
        self,
        server: VllmClient,
        request: Request,
        params: SamplingParams,
        episodes: Episodes,
        index: int,
        first: Completion,
    ) -> Completion:
        """Returns completion number `index` of a group, which has several turns, after its first.

        Each later turn is a request with everything so far as its prompt, which the server finds in
        its cache of prefixes. A turn that cannot be used fails the completion.
        """
        key = (self.seed, params.purpose, *request.address, index)
        episode = Episode(episodes, request.prompt, key)
        # The turns of the policy and the environment's replies.
        parts = [first]
        while parts[-1].outcome is None:
            turn_ids = parts[-1].token_ids.tolist()
            is_stopped = completes_stop(self.chat, turn_ids, params.stop)
            episode.end_turn(turn_ids, is_stopped=is_stopped)
            reply = episode.take()
            if episode.outcome is not None:
                break
            parts.append(_reply_part(reply))
            turn = _Turn(
                history=torch.cat([part.token_ids for part in parts]).tolist(),
                max_tokens=params.max_tokens - sum(part.length for part in parts),
                seed_key=(index, len(parts)),
            )
            parts += self._generate(server, request, turn, 1, params)
        return replace(
            self._join(parts),
            finished=episode.finished,
            outcome=parts[-1].outcome or episode.outcome,
            turns=tuple(episode.turns),
            prefix=episode.prefix,
        )

    def _generate(
        self, server: VllmClient, request: Request, turn: _Turn, n: int, params: SamplingParams
    ) -> list[Completion]:
        """Returns n samples of a turn by one server, also if weight syncs stop them."""
        completions: list[Completion] = []
        if params.episodes is None:
            completions += request.begun
        if not completions:
            sampled = self._ask(server, request, turn, n, params)
            completions = [self._cut_at_stop(completion, params.stop) for completion in sampled]
        numbers = [c for c, completion in enumerate(completions) if not completion.has_ended]
        if numbers:
            is_resumable = params.episodes is None and params.purpose == self.params.purpose
            if is_resumable:
                with self._lock:
                    self._stopped[request.address] = (request, completions)
            try:
                # A thread per completion, because each goes on from its own tokens.
                go_on = partial(self._go_on, server, request, turn, completions, params)
                run_all([partial(go_on, number) for number in numbers])
            finally:
                with self._lock:
                    self._stopped.pop(request.address, None)
        return completions

    def _go_on(
        self,
        server: VllmClient,
        request: Request,
        turn: _Turn,
        completions: list[Completion],
        params: SamplingParams,
        number: int,
    ) -> None:
        """Samples the rest of completion `number`, with the weights as they are then.

        Another weight sync may stop it once more. `completions` always has the tokens so far.
        """
        while not completions[number].has_ended:
            so_far = completions[number]
            rest = _Turn(
                history=[*turn.history, *so_far.token_ids.tolist()],
                max_tokens=turn.max_tokens - so_far.length,
                # The random numbers of the tokens so far are not used again.
                seed_key=(*turn.seed_key, number, "after", so_far.length),
            )
            with self._lock:
                self._recomputed += len(request.prompt.token_ids) + len(rest.history)
            (more,) = self._ask(server, request, rest, 1, params)
            joined = self._join([so_far, more])
            completions[number] = self._cut_at_stop(joined, params.stop)

    def _ask(
        self, server: VllmClient, request: Request, turn: _Turn, n: int, params: SamplingParams
    ) -> list[Completion]:
        """Returns n samples of a turn by one server, as far as they came before a weight sync."""
        self._groups.wait_until_released()
        seed_key = (self.seed, params.purpose, *request.address, *turn.seed_key)
        # Shifted to leave room: completion number g gets the seed `seed + g`.
        seed = int(generator(*seed_key).random_raw(1)[0]) >> 2
        with self.weights.using() as label:
            answers = server.generate(
                token_ids=[*request.prompt.token_ids, *turn.history],
                n=n,
                seed=seed,
                max_tokens=turn.max_tokens,
                temperature=params.tau,
                top_p=params.top_p,
                stop_token_ids=sorted(self.chat.eos_ids),
                stop=params.stop,
                label=label,
            )
        return [self._read(answer, server) for answer in answers]

    def _join(self, parts: Sequence[Completion]) -> Completion:
        """Returns one completion of consecutive parts. The last one says how it ended."""
        token_ids = torch.cat([part.token_ids for part in parts])
        return replace(
            parts[-1],
            token_ids=token_ids,
            rollout_logp=torch.cat([part.rollout_logp for part in parts]),
            versions=torch.cat([part.versions for part in parts]),
            text=self.chat.decode(token_ids.tolist()),
            sampled=torch.cat([part.sampled for part in parts]),
        )

    def _cut_at_stop(self, completion: Completion, stop: Sequence[str]) -> Completion:
        """Returns the completion up to the token that completes a stop text.

        The server stops there, too, but a server without a tokenizer does not know the text.
        """
        token_ids = completion.token_ids.tolist()
        length = count_until_stop(self.chat, token_ids, stop)
        if length is None or completion.outcome is not None or not completion.has_ended:
            return completion
        return replace(
            completion,
            token_ids=completion.token_ids[:length],
            rollout_logp=completion.rollout_logp[:length],
            versions=completion.versions[:length],
            sampled=completion.sampled[:length],
            finished=True,
            text=self.chat.decode(token_ids[:length]),
        )

    def _read(self, answer: Json, server: VllmClient) -> Completion:
        """Returns the completion in a server's answer. It has failed if it cannot be used."""
        token_ids: list[int] = answer["token_ids"] or []
        num_tokens = len(token_ids)
        logp = torch.full((num_tokens,), math.nan)
        entries = (answer["logprobs"] or {}).get("content") or []
        logp[: len(entries)] = torch.tensor([entry["logprob"] for entry in entries])
        versions = self._read_versions(answer["weight_versions"] or [], num_tokens, server)

        end = answer["finish_reason"]
        has_ended = end != STOPPED
        outcome = None
        if has_ended and (not token_ids or end not in ("stop", "length")):
            outcome = Outcome.failed(f"the server stopped it ({end!r}) after {num_tokens} tokens")
        elif bool((versions < 0).any()):
            outcome = Outcome.failed("the server did not report the weight version of every token")
        # Also false for NaN, which stands where the server sent no log-prob.
        elif not bool((logp > NO_LOGPROB).all()):
            outcome = Outcome.failed("the server returned a log-prob that is not finite")
        return Completion(
            token_ids=torch.tensor(token_ids, dtype=torch.long),
            rollout_logp=logp,
            versions=versions,
            finished=bool(token_ids) and token_ids[-1] in self.chat.eos_ids,
            text=self.chat.decode(token_ids),
            outcome=outcome,
            has_ended=has_ended or outcome is not None,
        )

    def _read_versions(self, spans: Sequence[Json], num_tokens: int, server: VllmClient) -> Tensor:
        """Returns the version that sampled each token: int64 [num_tokens], -1 where none is known.

        Raises SamplerError for weights that are not of this run.
        """
        versions = torch.full((num_tokens,), -1)
        for span in spans:
            version = self.weights.version_of(span["version"])
            if version < 0:
                raise SamplerError(
                    f"{server} sampled with weights labeled {span['version']}: it was restarted, "
                    "or another run uses it. Resume with a server that only this run uses"
                )
            versions[span["start"] : span["end"]] = version
        return versions


def _reply_part(reply: Sequence[int]) -> Completion:
    """Returns an environment's reply as a part of a completion: tokens that were not sampled."""
    num_tokens = len(reply)
    return Completion(
        token_ids=torch.tensor(reply, dtype=torch.long),
        rollout_logp=torch.full((num_tokens,), math.nan),
        versions=torch.full((num_tokens,), -1),
        finished=False,
        text="",
        sampled=torch.zeros(num_tokens, dtype=torch.bool),
    )


def _get_logprobs(items: Sequence[Item], server: VllmClient) -> list[list[list[float]]]:
    """Returns log-probs by every replica of a server: [replica][item][token].

    A server hands requests to its replicas in turn, so each replica is asked for all items.
    """

    def ask_replica(replica: int) -> list[list[float]]:
        return [server.get_logprobs(*item, replica) for item in items]

    return run_together([partial(ask_replica, replica) for replica in server.list_replicas()])
