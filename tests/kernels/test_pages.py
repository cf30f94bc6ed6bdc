"""Memory of large results: used again, never shared, never more kept than was in use at once."""

import threading

import torch
from hypothesis import given
from hypothesis import strategies as st

from lmoffload.kernels.pages import LEAST_BYTES, Pages

MIB = 2**20


def taken(pages: Pages, mib: float) -> torch.Tensor:
    return pages.empty((round(mib * MIB) // 4,), torch.float32)


def test_what_a_result_leaves_is_used_again():
    pages = Pages()
    first = taken(pages, 8)
    place = first.data_ptr()
    part = first[5:]
    del first
    other = taken(pages, 8)
    assert other.data_ptr() != place, "a view still refers to it"
    del part
    assert taken(pages, 7).data_ptr() == place


def test_nothing_small_is_kept():
    pages = Pages()
    taken(pages, LEAST_BYTES / MIB / 2)
    assert pages.kept_bytes == 0


def test_a_much_larger_piece_waits_for_a_result_of_its_size():
    pages = Pages()
    large, small = taken(pages, 32), taken(pages, 8)
    place = large.data_ptr()
    del large, small
    first, second = taken(pages, 5), taken(pages, 32)
    assert first.data_ptr() != place and second.data_ptr() == place
    third = taken(pages, 4)
    assert third.data_ptr() not in {first.data_ptr(), place}


def test_one_larger_result_takes_the_place_of_two():
    pages = Pages()
    pair = [taken(pages, 8) for _ in range(2)]
    pair.clear()
    assert pages.kept_bytes == 16 * MIB
    whole = taken(pages, 16)
    assert pages.kept_bytes == 0 and whole.numel() == 4 * MIB


def test_what_is_kept_is_given_back():
    pages = Pages()
    held = taken(pages, 8)
    taken(pages, 16)
    assert pages.kept_bytes == 16 * MIB
    pages.give_back()
    assert pages.kept_bytes == 0 and held.fill_(1).sum() == held.numel()
    del held
    assert pages.kept_bytes == 8 * MIB


def test_results_dropped_in_another_thread_come_back():
    pages, held = Pages(), []
    held.append(taken(pages, 8))
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pages.kept_bytes == 8 * MIB


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([4, 5, 7, 8, 12]), st.integers(0, 5)), max_size=25))
def test_results_never_share_and_no_more_is_kept_than_was_in_use(steps):
    pages, held, most = Pages(), dict[int, torch.Tensor](), 0
    for number, (takes, mib, which) in enumerate(steps):
        if takes or not held:
            held[number] = taken(pages, mib)
            held[number][:: 4096 // 4] = number
        else:
            del held[list(held)[which % len(held)]]
        pieces = sum(-(-t.nbytes // 4096) * 4096 for t in held.values())
        assert all(bool((tensor[:: 4096 // 4] == place).all()) for place, tensor in held.items())
        kept = pages.kept_bytes
        most = max(most, pages._used_bytes)
        assert pieces <= pages._used_bytes and pages._used_bytes + kept <= most
