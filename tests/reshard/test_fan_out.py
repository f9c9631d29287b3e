"""Ways by hand: who copies, who enters a machine, who passes on; and the order of buckets."""

from __future__ import annotations

from mega_agentrl.reshard.delivery import Hop, Piece
from mega_agentrl.reshard.fan_out import Dispatcher, find_way, make_parcels
from mega_agentrl.reshard.lanes import Lane
from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.links import LinkSpeeds, Location

BYTES = 100


def lane(holders, takers, name="w", num_bytes=BYTES):
    return Lane(holders, takers, num_bytes, [Piece(name, Rect((0,), (num_bytes,)), num_bytes)])


def dispatch(lanes, locations, bucket_bytes=BYTES):
    parcels = make_parcels(lanes, locations, bucket_bytes)
    return Dispatcher(locations, LinkSpeeds()).dispatch(parcels)


def hops_of(lanes, locations):
    return [tuple(map(tuple, bucket.hops)) for bucket in dispatch(lanes, locations)]


def test_takers_on_a_holders_device_copy_and_the_others_get_it_from_them():
    places = [Location(0, 0), Location(0, 1), Location(0, 0), Location(0, 1), Location(0, 2)]
    ((*copies, last),) = hops_of([lane((0, 1), (2, 3, 4))], places)
    assert copies == [(0, 2), (1, 3)]
    assert last in {(2, 4), (3, 4)}


def test_of_two_replicas_on_a_device_the_first_serves():
    places = [Location(0, 0), Location(0, 0), Location(0, 0)]
    assert find_way(lane((0, 1), (2,)), places).near[0].copies == ((0, 2),)


def test_a_holder_on_the_machine_is_preferred_to_one_that_has_sent_less():
    places = [Location(0, 0), Location(1, 0), Location(1, 1)]
    assert hops_of([lane((0, 1), (2,)), lane((0, 1), (2,), "v")], places) == [((1, 2),)] * 2


def test_of_equally_near_holders_the_one_that_has_sent_least_starts():
    places = [Location(0), Location(1), Location(2), Location(3)]
    lanes = [lane((0, 1), (3,), f"w{i}") for i in range(4)] + [lane((2,), (3,), "x")]
    sources = [hop.source for bucket in dispatch(lanes, places) for hop in bucket.hops]
    assert sorted(sources) == [0, 0, 1, 1, 2]


def test_a_copy_on_a_device_does_not_count_as_sending():
    places = [Location(0, 0), Location(1, 0), Location(0, 0), Location(2, 0)]
    lanes = [lane((0, 1), (2,)), lane((0, 1), (3,), "v"), lane((0, 1), (3,), "u")]
    assert sorted(hops_of(lanes, places)) == [((0, 2),), ((0, 3),), ((1, 3),)]
    assert sorted(hops_of(lanes[:2], places)) == [((0, 2),), ((0, 3),)]


def test_machines_without_a_holder_are_a_chain_that_is_entered_once_each():
    # trainer on machine 0; takers on machines 1, 1, 2, 2, 3
    places = [Location(0), *(Location(node, n) for n, node in enumerate((1, 1, 2, 2, 3)))]
    (hops,) = hops_of([lane((0,), (1, 2, 3, 4, 5))], places)
    assert hops[:2] == ((0, 1), (1, 2))
    assert [target for _, target in hops] == [1, 2, 3, 4, 5]
    assert hops[2][0] in {1, 2}
    assert hops[4][0] in {3, 4}


def test_the_trainer_sends_nothing_over_the_network_once_a_taker_has_copied():
    places = [Location(0, 0), Location(0, 0), Location(1, 0)]
    assert hops_of([lane((0,), (1, 2))], places) == [((0, 1), (1, 2))]


def test_entries_take_turns_so_that_all_network_ports_of_a_machine_are_used():
    places = [Location(0), *(Location(1, n) for n in range(4))]
    buckets = dispatch([lane((0,), (1, 2, 3, 4), num_bytes=8 * BYTES)], places)
    entries = [bucket.hops[0].target for bucket in buckets]
    assert sorted(entries) == [1, 1, 2, 2, 3, 3, 4, 4]
    passed_on = [hop.source for bucket in buckets for hop in bucket.hops[1:]]
    assert max(map(passed_on.count, (1, 2, 3, 4))) <= 8


def test_trainer_ranks_do_not_queue_in_front_of_one_taker():
    places = [Location(node) for node in range(6)]
    lanes = [lane((s,), (t,), f"{s}{t}") for t in (3, 4, 5) for s in (0, 1, 2)]
    hops = [bucket.hops[0] for bucket in dispatch(lanes, places)]
    for start in (0, 3, 6):
        together = hops[start : start + 3]
        assert len({hop.source for hop in together}) == len({hop.target for hop in together}) == 3


def test_buckets_are_numbered_in_order_and_nothing_is_lost():
    places = [Location(0), Location(1)]
    buckets = dispatch([lane((0,), (1,), num_bytes=950)], places)
    assert [bucket.index for bucket in buckets] == list(range(10))
    assert sum(bucket.num_bytes for bucket in buckets) == 950
    assert all(bucket.hops == (Hop(0, 1),) for bucket in buckets)
