"""Proof that all who meet in a store are ranks of one attempt: each knows a secret that only they can read.

A store listens for connections, on several hosts from everywhere, and asks nobody who they are. So before the
ranks rely on it, each publishes a random challenge and then an HMAC of all challenges under its own rank
(challenge and response with a shared key, FIPS 198-1). A stranger's rank cannot answer, a stranger's store
cannot answer for the others, and an answer of another attempt or of an earlier start does not fit.

The secret protects who takes part, not what is sent: traffic is not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Protocol

from harness.errors import MembershipError

SECRET_BYTES = 32
_CHALLENGE_BYTES = 16


class KeyValueStore(Protocol):
    """What is needed of torch's stores; `get` waits for the key."""

    def set(self, key: str, value: str) -> None:
        """Publish a value."""

    def get(self, key: str) -> bytes:
        """The value, once it is there."""


def new_secret() -> bytes:
    """A secret for one start of one attempt."""
    return secrets.token_bytes(SECRET_BYTES)


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
    challenges = _exchange(store, "challenge", rank, world_size, own)
    if challenges[rank] != own:
        raise MembershipError(f"another process acts as rank {rank} of {run}; this one does not take part")

    def answer(of: int) -> str:
        message = "\n".join([run, str(world_size), str(of), *challenges])
        return hmac.new(secret, message.encode(), "sha256").hexdigest()

    expected = [answer(of) for of in range(world_size)]
    answers = _exchange(store, "answer", rank, world_size, expected[rank])
    pairs = zip(answers, expected, strict=True)
    strangers = [of for of, (got, right) in enumerate(pairs) if not hmac.compare_digest(got, right)]
    if strangers:
        who = "the store and every other rank" if len(strangers) == world_size - 1 else f"ranks {strangers}"
        raise MembershipError(
            f"{who} could not prove that they belong to {run}: they do not know the secret in its run "
            f"folder, and so are another user's or another attempt's"
        )


def _exchange(store: KeyValueStore, what: str, rank: int, world_size: int, own: str) -> list[str]:
    store.set(f"membership/{what}/{rank}", own)
    keys = (f"membership/{what}/{of}" for of in range(world_size))
    return [store.get(key).decode("ascii", errors="backslashreplace") for key in keys]
