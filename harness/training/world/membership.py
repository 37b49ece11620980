"""Proof that all who meet in a store are ranks of one attempt: each knows a secret that only they can read.

A store listens for connections, on several hosts from everywhere, and asks nobody who they are. So before the
ranks rely on it, each publishes a random challenge and then an HMAC of all challenges under its own rank
(challenge and response with a shared key, FIPS 198-1). Rank 0 collects the challenges, checks the answers,
and vouches for them by an HMAC of its own, so that the store is read four times a rank in all. A stranger's
rank cannot answer, a stranger's store or rank 0 cannot vouch, and nothing of another attempt or of an earlier
start fits.

The secret protects who takes part, not what is sent: traffic is not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from typing import Protocol

from harness.errors import MembershipError

_CHALLENGE_BYTES = 16
_REFUSED = "refused"


class KeyValueStore(Protocol):
    """What is needed of torch's stores; `get` waits for the key."""

    def set(self, key: str, value: str) -> None:
        """Publish a value."""

    def get(self, key: str) -> bytes:
        """The value, once it is there."""


def prove_membership(store: KeyValueStore, rank: int, world_size: int, secret: bytes, run: str) -> None:
    """Prove to all ranks that this process is `rank` of `run`, and have them prove it; all ranks call it.

    Args:
        store: of the ranks.
        rank: of this process.
        world_size: number of ranks.
        secret: known to the ranks only.
        run: name of what they take part in, the same on all.

    Raises:
        MembershipError: another process acts as a rank, or as the store.
    """
    own = secrets.token_hex(_CHALLENGE_BYTES)
    store.set(f"membership/challenge/{rank}", own)
    if rank == 0:
        found = [_get(store, f"membership/challenge/{of}") for of in range(world_size)]
        store.set("membership/challenges", "\n".join(found))
    challenges = _get(store, "membership/challenges").split("\n")
    if challenges[rank : rank + 1] != [own] and len(challenges) == world_size:
        raise MembershipError(f"another process acts as rank {rank} of {run}; this one does not take part")

    def answer(of: str) -> str:
        message = "\n".join([run, str(world_size), of, *challenges])
        return hmac.new(secret, message.encode(), "sha256").hexdigest()

    store.set(f"membership/answer/{rank}", answer(str(rank)))
    if rank == 0:
        _check_answers(store, [answer(str(of)) for of in range(world_size)], run)
        store.set("membership/vouched", answer("all"))
    elif not hmac.compare_digest(_get(store, "membership/vouched"), answer("all")):
        raise MembershipError(
            f"the store or rank 0 could not prove that all belong to {run}: somebody there does not know the "
            f"secret in its run folder, and so is another user's or another attempt's"
        )


def _check_answers(store: KeyValueStore, expected: Sequence[str], run: str) -> None:
    answers = [_get(store, f"membership/answer/{of}") for of in range(len(expected))]
    pairs = zip(answers, expected, strict=True)
    strangers = [of for of, (got, right) in enumerate(pairs) if not hmac.compare_digest(got, right)]
    if strangers:
        store.set("membership/vouched", _REFUSED)  # else the others would wait for it
        raise MembershipError(
            f"ranks {strangers} could not prove that they belong to {run}: they do not know the secret in "
            f"its run folder, and so are another user's or another attempt's"
        )


def _get(store: KeyValueStore, key: str) -> str:
    return store.get(key).decode("ascii", errors="backslashreplace")
