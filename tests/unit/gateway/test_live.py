"""Requests under way: found by each of their names, aborted once, and never mistaken for a client that left."""

import asyncio

import pytest

from gateway.errors import GatewayError
from gateway.live import LiveRequests, ending, wanted_rid


async def for_ever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("name", ["public", "asked-for"])
async def test_an_abort_ends_the_request_with_an_error_of_its_own(name: str) -> None:
    live = LiveRequests()
    task = asyncio.ensure_future(live.run(("public", "asked-for"), for_ever()))
    await asyncio.sleep(0)
    assert len(live) == 1
    assert live.abort(name) == 1
    assert live.abort(name) == 0, "once is enough"
    with pytest.raises(GatewayError) as raised:
        await task
    assert (raised.value.status, raised.value.code) == (499, "aborted")
    assert len(live) == 0


async def test_shutting_down_ends_everybody_once_and_says_so() -> None:
    live = LiveRequests()
    tasks = [asyncio.ensure_future(live.run((f"id-{number}", "shared"), for_ever())) for number in range(3)]
    await asyncio.sleep(0)
    live.abort("id-0")
    assert live.shut_down() == 2
    assert live.shut_down() == 0
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [error.code for error in ended if isinstance(error, GatewayError)] == ["aborted", *["shutting_down"] * 2]


async def test_fencing_ends_everybody_and_says_so() -> None:
    live = LiveRequests()
    task = asyncio.ensure_future(live.run(("id",), for_ever()))
    await asyncio.sleep(0)
    live.fence()
    with pytest.raises(GatewayError) as raised:
        await task
    error = raised.value
    assert (error.status, error.code, error.definite, error.safe_to_retry) == (503, "gateway_fenced", False, True)
    assert error.retry_after_s


async def test_a_client_that_leaves_is_no_abort() -> None:
    live = LiveRequests()
    task = asyncio.ensure_future(live.run(("public",), for_ever()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(live) == 0


async def test_a_client_that_leaves_during_an_abort_has_left() -> None:
    live = LiveRequests()
    task = asyncio.ensure_future(live.run(("public",), for_ever()))
    await asyncio.sleep(0)
    live.abort("public")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("in_sub_task", [False, True])
async def test_a_request_that_ends_is_not_aborted_any_more(in_sub_task: bool) -> None:
    live, may_end = LiveRequests(), asyncio.Event()

    async def end() -> None:
        ending()

    async def work() -> None:
        await (asyncio.ensure_future(end()) if in_sub_task else end())
        await may_end.wait()

    ends = asyncio.ensure_future(live.run(("id",), work()))
    goes_on = asyncio.ensure_future(live.run(("id",), for_ever()))
    await asyncio.sleep(0.01)
    assert live.abort("id") == 1, "the one that goes on"
    may_end.set()
    await ends
    with pytest.raises(GatewayError):
        await goes_on


def test_outside_of_a_request_nothing_ends() -> None:
    ending()


async def test_names_may_be_shared_and_unknown_ones_end_nothing() -> None:
    live = LiveRequests()
    tasks = [asyncio.ensure_future(live.run((f"id-{number}", "shared"), for_ever())) for number in range(2)]
    await asyncio.sleep(0)
    assert live.abort("nobody") == 0
    assert live.abort("id") == 0, "exact names only"
    assert live.abort("id-0") == 1
    assert live.abort("shared") == 1
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, GatewayError) for error in ended)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"{}", b'{"rid":""}', b'{"rid":7}', b'{"abort_all":true}'])
def test_a_rid_is_needed(raw: bytes) -> None:
    with pytest.raises(GatewayError, match="rid"):
        wanted_rid(raw)


def test_the_rid() -> None:
    assert wanted_rid(b'{"rid":"x","abort_all":false}') == "x"
