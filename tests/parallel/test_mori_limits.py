"""What MORI's ops are built with: kernels by node span, grids, and the heap against sizes computed elsewhere."""

from __future__ import annotations

import pytest

from rocm_serve.errors import UserError
from rocm_serve.parallel.exchange.mori_limits import OpShape, check_heap, group_gpus, heap_bytes, op_shapes, total_heap

GIB = 1 << 30

# GiB for hidden 8192, top-10 of 512, 64 fp32 scales, 2 bytes, by capacity: computed by hand from the allocator, for
# EP8 inside a node and for the larger kernel of EP16. They leave out the map of received rows, below 1 %.
BY_HAND = {
    256: (0.07, None),
    1024: (0.27, 0.64),
    2048: (0.55, 1.29),
    4096: (1.09, 2.57),
    8192: (2.19, 5.15),
    16384: (4.38, 10.3),
}


def gib(world: int, capacity: int) -> float:
    shape = op_shapes(world, 8, capacity, 304)[-1]
    needed = heap_bytes(
        shape,
        world=world,
        gpus_per_node=8,
        hidden_size=8192,
        top_k=10,
        slots_per_rank=512 // world,
        row_type_bytes=2,
        scales_a_row=64,
    )
    return needed / GIB


@pytest.mark.parametrize("capacity", BY_HAND)
def test_the_heap_is_what_the_allocator_takes(capacity: int) -> None:
    for world, expected in zip((8, 16), BY_HAND[capacity], strict=True):
        if expected is not None:
            assert -0.005 <= gib(world, capacity) - expected <= 0.01 * expected + 0.005


def test_the_heap_of_a_small_op_buffer_by_buffer() -> None:
    """2 ranks of 64 rows: 128 rows of 16 bytes come. With a scale and without."""
    shape = OpShape("IntraNode", 64, 80, 16, 0)
    common = {"world": 2, "gpus_per_node": 8, "hidden_size": 8, "top_k": 2, "slots_per_rank": 3, "row_type_bytes": 2}
    small = heap_bytes(shape, **common, scales_a_row=0) - (1 << 20)
    # combine's input: row, 2 ids, 2 weights, number; dispatch's output; combine's output; 3 weights; 2 ids; the map
    assert small == 128 * (16 + 8 + 8 + 4) + 128 * 16 + 64 * 16 + 3 * 128 * 8 + 2 * 128 * 8 + 128 * 3 * 4
    assert heap_bytes(shape, **common, scales_a_row=1) - (1 << 20) - small == 128 * 4 + 2 * 128 * 4


def test_inside_a_node_one_op_does() -> None:
    assert op_shapes(8, 8, 4096, 304) == (OpShape("IntraNode", 4096, 80, 16, 0),)
    assert op_shapes(4, 8, 256, 304) == (OpShape("IntraNode", 256, 80, 16, 0),)


def test_grids_do_not_exceed_the_compute_units() -> None:
    """80 are an MI308X's; fewer are what a partitioned GPU has."""
    assert op_shapes(8, 8, 256, 80)[0].block_num == 80
    assert op_shapes(8, 8, 256, 38)[0].block_num == 38
    assert all(shape.rdma_block_num < shape.block_num <= 38 for shape in op_shapes(16, 8, 512, 38))


def test_over_nodes_small_batches_have_a_kernel_of_their_own() -> None:
    few, many = op_shapes(16, 8, 1024, 304)
    assert (few.kernel, few.capacity) == ("InterNodeV1LL", 256)
    assert (many.kernel, many.capacity) == ("InterNodeV1", 1024)
    assert [shape.kernel for shape in op_shapes(16, 8, 256, 304)] == ["InterNodeV1LL"]


@pytest.mark.parametrize(
    ("world", "gpus", "capacity", "words"),
    [
        (8, 8, 100, "whole 64s of rows, not 100"),
        (8, 8, 0, "whole 64s of rows, not 0"),
        (6, 8, 64, "1, 2, 4 or 8 ranks of a stage on each node, and --tp 6 puts 6 on one"),
        (12, 8, 64, "--tp 12 puts 8 on one"),
        (16, 16, 64, "at most 8 GPUs of a node, not 16"),
    ],
)
def test_what_mori_cannot_serve_is_refused(world: int, gpus: int, capacity: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        op_shapes(world, gpus, capacity, 304)


def test_ranks_on_a_node() -> None:
    assert [group_gpus(world, 8) for world in (1, 2, 4, 8, 16, 32)] == [1, 2, 4, 8, 8, 8]


@pytest.mark.parametrize(
    ("setting", "fits"),
    [
        (None, 4 * GIB),
        ("8G", 8 * GIB),
        ("8g", 8 * GIB),
        ("8GB", 8 * GIB),
        ("8 GiB", 8 * GIB),
        ("512M", GIB // 2),
        ("1T", 1024 * GIB),
        (str(GIB), GIB),
        ("1024k", 1 << 20),
    ],
)
def test_a_heap_is_enough_up_to_its_size(setting: str | None, fits: int) -> None:
    check_heap(fits, setting)
    with pytest.raises(UserError, match="needs .* GiB of MORI's heap"):
        check_heap(fits + 1, setting)


def test_a_heap_that_is_too_small_is_told_with_one_that_does() -> None:
    with pytest.raises(UserError) as told:
        check_heap(int(4.41 * GIB), None)
    assert str(told.value) == (
        "--expert-exchange mori needs 4.41 GiB of MORI's heap: MORI_SHMEM_HEAP_SIZE is not set and MORI's own is 4G;"
        " set MORI_SHMEM_HEAP_SIZE=5G in the environment of every rank"
    )
    check_heap(int(4.41 * GIB), "5G")


@pytest.mark.parametrize("setting", ["", "much", "-1G", "1.5G", "8X"])
def test_a_heap_that_is_no_size_is_refused(setting: str) -> None:
    with pytest.raises(UserError, match=f"MORI_SHMEM_HEAP_SIZE={setting} is no size such as 8G; set .*=1G in"):
        check_heap(1, setting)


def test_several_ops_take_what_each_takes() -> None:
    assert total_heap([5 * GIB, GIB]) > 6 * GIB
