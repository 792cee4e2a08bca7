"""Boundary: from the ranks' partial rows to the next sublayer's input, in one launch.

The blocks of a cluster split the row, and take a group of tokens together. Each thread
holds one fragment of one residual stream. The MIX projections and the norm are summed
over the cluster by stores that count themselves at a barrier of their receiver, so that
no thread fences and no block waits for more than its sums.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from . import ptx
from .constants import (
    FN_BYTES,
    FN_FRAGMENT_BYTES,
    FN_ROW_BYTES,
    FN_STREAM_BYTES,
    FRAGMENT_BYTES,
    FRAGMENT_WORDS,
    FRAGMENTS,
    FRAGMENTS_PER_WARP,
    GENERATION_BYTES,
    GENERATIONS,
    HC,
    LANE_WORDS,
    LAST_SUM,
    MIX,
    NORM_SQUARES,
    OWN_SUMS,
    POLLS,
    ROW_BYTES,
    SHARED_SUMS,
    SLOT_BYTES,
    SOURCES,
    SQUARES,
    STASH_STREAM,
    STASH_TOKEN,
    SUMS_STRIDE,
    TOKEN_BYTES,
    TP,
    TRIPS,
    WORD_LANES,
)
from .mixes import store_mixes
#: if plan.projection == "fma"
from .projection_fma import copy_projection, load_projection, project, store_sums
#: else
from .steps import (
    copy_projection,
    load_projection,
    project,
    read_projection,
    store_sums,
    stream_projection,
)
#: endif
from .signature import SmemAllocator, boundary_arguments
from .steps import (
    FLOAT_BYTES,
    SENTINEL_PAIR,
    collapse,
    load_arrivals,
    normalize,
    poll_ranks,
    post_mix,
    pre_mix,
    row_major,
    row_rstd,
    sanitize,
    square_sum,
    stream_means,
    sum_peers,
    sum_ranks,
    sum_row,
    sum_warp,
    unpack,
    wait_for_sums,
    zero_unless,
)

#: if plan.delayed
WEIGHTS = HC + HC * HC + HC  # of a token: its post-mix, residual mix and pre-mix
#: else
WEIGHTS = HC + HC * HC  # of a token: its post-mix, then its residual mix
#: endif
#: if plan.tp > 1
SENTINELS = [SENTINEL_PAIR] * FRAGMENT_WORDS
#: endif


class Boundary:
    """A cluster takes ``group`` tokens; the last cluster may have fewer."""

#: if plan.tp > 1
    def __init__(self, target, group, publishes=None):
        """Takes the launch shape of one architecture and the token group.

        Args:
            target: The launch shape.
            group: Tokens that a cluster takes together.
            publishes: The transport that the kernel sends its own rows by; None where
                a launch before it has published.
        """
        self.publishes = publishes
#: else
    def __init__(self, target, group):
        """Takes the launch shape of one architecture and the token group."""
#: endif
        self.group = group
        self.cluster_size = target.cluster_size
        self.fragments = target.fragments
        self.threads = target.threads
        self.warps = target.warps
        self.items_at_once = target.at_once(group)

    def arguments(self):
        """Stand-ins for the arguments of a launch, in order."""
#: if plan.tp > 1
        return boundary_arguments(self.publishes)
#: else
        return boundary_arguments()
#: endif

    @cute.jit
    def __call__(
        self,
#: if plan.tp > 1
        x: cute.Tensor | None,  # [M, HIDDEN] «plan.activation», this rank's partial rows
        mailboxes: cute.Tensor | None,  # [destinations] addresses of mailboxes
        rank: Int32,
#: else
        x: cute.Tensor,  # [M, HIDDEN] «plan.activation»
#: endif
        residual: cute.Tensor,  # [M, HC, HIDDEN] «plan.activation»
        post: cute.Tensor,  # [M, HC, 1] FP32
        comb: cute.Tensor,  # [M, HC, HC] FP32, [source, target]
#: if plan.delayed
        pre: cute.Tensor,  # [M, HC] FP32
#: endif
        fn: cute.Tensor,  # [MIX, HC * HIDDEN] «plan.fn_weight»
        scale: cute.Tensor,  # [3] FP32
        base: cute.Tensor,  # [MIX] FP32
#: if plan.norm_weight != "none"
        norm_weight: cute.Tensor,  # [HIDDEN] «plan.activation»
#: endif
#: if plan.tp > 1
        mailbox: cute.Tensor,  # [GENERATIONS, TP, CAPACITY, HIDDEN] «plan.activation»
        state: cute.Tensor,  # [2] generation, arrivals
#: endif
        new_residual: cute.Tensor,  # [M, HC, HIDDEN] «plan.activation», out
#: if plan.tail
        new_post: cute.Tensor,  # [M, HC, 1] FP32, out
        new_comb: cute.Tensor,  # [M, HC, HC] FP32, out
#: if plan.delayed
        new_pre: cute.Tensor,  # [M, HC] FP32, out
#: endif
#: else
        mix: cute.Tensor,  # [M, MIX] FP32, out
#: endif
        layer_input: cute.Tensor,  # [M, HIDDEN] «plan.activation», out
#: if plan.stream_mean
        stream_mean: cute.Tensor,  # [M, HIDDEN] «plan.activation», out
#: endif
        stream,
    ):
        """Launches the kernel."""
        self.kernel(
            x,
#: if plan.tp > 1
            mailboxes,
            rank,
#: endif
            residual,
            post,
            comb,
#: if plan.delayed
            pre,
#: endif
            fn,
            scale,
            base,
#: if plan.norm_weight != "none"
            norm_weight,
#: endif
#: if plan.tp > 1
            mailbox,
            state,
#: endif
            new_residual,
#: if plan.tail
            new_post,
            new_comb,
#: if plan.delayed
            new_pre,
#: endif
#: else
            mix,
#: endif
            layer_input,
#: if plan.stream_mean
            stream_mean,
#: endif
        ).launch(
            grid=[
                self.cluster_size,
                (residual.shape[0] + self.group - 1) // self.group,
                1,
            ],
#: if plan.tail
            block=[self.threads + 32, 1, 1],
#: else
            block=[self.threads, 1, 1],
#: endif
            cluster=[self.cluster_size, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
#: if plan.tp > 1
        x: cute.Tensor | None,
        mailboxes: cute.Tensor | None,
        rank: Int32,
#: else
        x: cute.Tensor,
#: endif
        residual: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor,
#: if plan.delayed
        pre: cute.Tensor,
#: endif
        fn: cute.Tensor,
        scale: cute.Tensor,
        base: cute.Tensor,
#: if plan.norm_weight != "none"
        norm_weight: cute.Tensor,
#: endif
#: if plan.tp > 1
        mailbox: cute.Tensor,
        state: cute.Tensor,
#: endif
        new_residual: cute.Tensor,
#: if plan.tail
        new_post: cute.Tensor,
        new_comb: cute.Tensor,
#: if plan.delayed
        new_pre: cute.Tensor,
#: endif
#: else
        mix: cute.Tensor,
#: endif
        layer_input: cute.Tensor,
#: if plan.stream_mean
        stream_mean: cute.Tensor,
#: endif
    ):
        """Takes a group of tokens through steps 1 to 5«", and one warp on to 7" if plan.tail else ""»."""
        cute.arch.griddepcontrol_launch_dependents()
        thread = cute.arch.thread_idx()[0]
        block, cluster, _ = cute.arch.block_idx()
        first = cluster * self.group
        count = cutlass.min(residual.shape[0] - first, self.group)

        memory = SmemAllocator()
        sums = memory.allocate_tensor(
            Float32, row_major(self.group, LAST_SUM + 1, self.cluster_size), 16
        )
#: if not plan.delayed
        norms = memory.allocate_tensor(
            Float32, row_major(self.group, self.cluster_size), 16
        )
#: endif
        arrived = memory.allocate(16, 16).toint()
        if thread == 0:
#: if plan.delayed
            # One barrier, of one phase.
            ptx.init_barrier(arrived)
#: else
            # One barrier for the sums, one for the norms; each has one phase.
            ptx.init_barrier(arrived)
            ptx.init_barrier(arrived + 8)
#: endif
            ptx.fence_barriers()
            own_tokens = (count + self.cluster_size - 1 - block) // self.cluster_size
            values = count * SHARED_SUMS + own_tokens * OWN_SUMS
            ptx.expect_bytes(arrived, values * (self.cluster_size * FLOAT_BYTES))
#: if not plan.delayed
            ptx.expect_bytes(arrived + 8, count * (self.cluster_size * FLOAT_BYTES))
#: endif
        cute.arch.sync_threads()
        # Peers may store here from now on; the wait is before their first store.
        cute.arch.cluster_arrive()

        call = SimpleNamespace(
            x=x,
#: if plan.tp > 1
            mailboxes=mailboxes,
            rank=rank,
            mailbox=mailbox,
            state=state,
#: endif
            residual=residual,
            post=post,
            comb=comb,
#: if plan.delayed
            pre=pre,
#: endif
            fn=fn,
            scale=scale,
            base=base,
#: if plan.norm_weight != "none"
            norm_weight=norm_weight,
#: endif
            new_residual=new_residual,
#: if plan.tail
            new_post=new_post,
            new_comb=new_comb,
#: if plan.delayed
            new_pre=new_pre,
#: endif
#: else
            mix=mix,
#: endif
            layer_input=layer_input,
#: if plan.stream_mean
            stream_mean=stream_mean,
#: endif
            memory=memory,
            sums=sums,
#: if not plan.delayed
            norms=norms,
#: endif
            arrived=arrived,
            first=first,
            count=count,
        )
#: if plan.tail
        if cute.arch.warp_idx() < self.warps:
            self.take_tokens(call)
        else:
            self.mix_tokens(call)
#: else
        self.take_tokens(call)
#: endif

    @cute.jit
    def take_tokens(self, call):
        """Takes the group's tokens through steps 1 to 5."""
        thread = cute.arch.thread_idx()[0]
        block = cute.arch.block_idx()[0]
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx()
        stream = thread % HC
        first, count = call.first, call.count
        # Places beyond the last token repeat it, to no effect.
        tokens = [first]
        tokens += [first + cutlass.min(index, count - 1) for index in range(1, self.group)]

        stash = call.memory.allocate(self.warps * «"TRIPS * " if plan.trips > 1 else ""»self.group * STASH_TOKEN, 16)
        weights = call.memory.allocate_tensor(Float32, row_major(self.group * WEIGHTS), 16)
        partials = call.memory.allocate_tensor(
            Float32, row_major(self.warps, self.group, SUMS_STRIDE), 16
        )
#: if not plan.delayed
        squares = call.memory.allocate_tensor(
            Float32, row_major(self.group, self.warps), 16
        )
#: endif
        warp_stash = stash.toint() + warp * («"TRIPS * " if plan.trips > 1 else ""»self.group * STASH_TOKEN)
#: if plan.trips > 1
        shares = [self.share(call, warp_stash, trip) for trip in range(TRIPS)]
        items = [(index, share) for index in range(self.group) for share in shares]
#: else
        share = self.share(call, warp_stash)
        items = [(index, share) for index in range(self.group)]
#: endif

        # Weights: no kernel writes them.
#: if plan.fn_home == "shared"
        fn_stash = call.memory.allocate(self.threads * «"TRIPS * " if plan.projection == "fma" and plan.trips > 1 else ""»FN_BYTES, 16)
        fn_place = fn_stash.toint() + thread * FRAGMENT_BYTES
#: endif
#: if plan.projection == "fma"
#: if plan.trips > 1
        fn_stream = call.fn.iterator.toint() + stream * FN_STREAM_BYTES
        first_fragment = block * self.fragments + thread // HC
#: if plan.fn_home == "shared"
        copy_projection(fn_place, fn_stream, first_fragment, self.threads)
#: endif
#: else
        fn_address = (
            call.fn.iterator.toint()
            + stream * FN_STREAM_BYTES
            + share.fragment * FN_FRAGMENT_BYTES
        )
#: if plan.fn_home == "registers"
        rows = load_projection(fn_address)
#: elif plan.fn_home == "shared"
        copy_projection(fn_place, fn_address, self.threads)
#: endif
#: endif
#: else
        warp_column = block * self.fragments + warp * FRAGMENTS_PER_WARP
#: if plan.fn_home == "shared"
        copy_projection(
            fn_place,
#: elif plan.fn_home == "registers"
        rows = load_projection(
#: else
        fn_address = (
#: endif
            call.fn.iterator.toint()
#: if plan.mix % 8
            + cutlass.min(lane // 4, MIX - 1) * FN_ROW_BYTES
#: else
            + lane // 4 * FN_ROW_BYTES
#: endif
#: if plan.fn_home == "global" or (plan.fn_home == "registers" and not plan.idle_lanes)
            + (warp_column + lane % 4) * FRAGMENT_BYTES
#: else
            + (warp_column + lane % 4) * FRAGMENT_BYTES,
#: if plan.idle_lanes
            warp_column + lane % 4,
#: endif
#: if plan.fn_home == "shared"
            self.threads,
#: endif
#: endif
        )
#: endif
#: if not plan.delayed
        pre_scale = call.scale[0]
        pre_base = call.base[stream]
#: endif
#: if plan.tp > 1
        destinations = self.destinations(call, stream)

        if cutlass.const_expr(self.publishes is not None):
            cute.arch.griddepcontrol_wait()
        # Otherwise the publish before this kernel has triggered after its own wait, so
        # what earlier kernels wrote is complete; what it sends announces itself.
        state = call.state
        generation = ptx.load_int_relaxed(state.iterator.toint())
        # The last block to have read the generation advances it when it ends.
        arrival = Uint32(0)
        last = cute.arch.grid_dim()[1] * self.cluster_size - 1
        if thread == 0:
            # The sum makes the count wait for the generation.
            arrival = ptx.count_arrival(
                state.iterator.toint() + 4, last + (generation & 0)
            )
#: else

        # From here on it loads what other kernels wrote, the last of them just now.
        cute.arch.griddepcontrol_wait()
#: endif
        for index, share in items:
            ptx.copy_async(
                share.stash + index * STASH_TOKEN,
                call.residual.iterator.toint()
                + Int64(tokens[index] * TOKEN_BYTES)
                + (stream * ROW_BYTES + share.column),
            )
        token_weights = self.load_weights(call)
#: if plan.tp > 1
        if cutlass.const_expr(self.publishes is not None):
            for batch in batches(items, self.items_at_once):
                self.publish(call, batch, tokens, destinations, generation, stream)
        slots = (
            call.mailbox.iterator.toint()
            + Int64(generation) * GENERATION_BYTES
            + stream % SOURCES * POLLS * SLOT_BYTES
        )
#: endif
        for place, weight in token_weights:
            weights[place] = weight
        cute.arch.cluster_wait()
        ptx.wait_copies()
        self.sync()

        # Steps 1 and 2.
#: if plan.delayed
        collapsed = []
        totals = []
#: endif
        for batch in batches(items, self.items_at_once):
#: if plan.tp > 1
            places = [
                slots + (tokens[index] * ROW_BYTES + share.column)
                for index, share in batch
            ]
            arrivals = [
                load_arrivals(place, «"share.own & " if plan.idle_lanes else ""»(index < count))
                for place, (index, share) in zip(places, batch, strict=True)
            ]
            rows_arrived = [
                poll_ranks(place, words)
                for place, words in zip(places, arrivals, strict=True)
            ]
            ys = [sum_ranks(arrived) for arrived in rows_arrived]
#: else
            x_rows = [
                ptx.load_l2(
                    call.x.iterator.toint()
                    + Int64(tokens[index] * ROW_BYTES + share.column)
                )
                for index, share in batch
            ]
            ys = [unpack(sanitize(words)) for words in x_rows]
#: endif
            for y, (index, share) in zip(ys, batch, strict=True):
                old = [
                    ptx.load_shared(
                        share.streams + (index * STASH_TOKEN + source * STASH_STREAM)
                    )
                    for source in range(HC)
                ]
                own_weight = index * WEIGHTS + stream
                comb_weights = [
                    weights[own_weight + HC + source * HC] for source in range(HC)
                ]
                new = post_mix(y, weights[own_weight], comb_weights, old)
#: if plan.idle_lanes
                new = zero_unless(share.own, new)
#: endif
                # The lanes of a fragment have read each other's old streams.
                cute.arch.sync_warp()
                ptx.store_shared(share.stash + index * STASH_TOKEN, new)
#: if plan.delayed
                # Step 5, first half: the carried pre-mix needs no sum.
                pre = weights[own_weight + HC + HC * HC]
                collapsed.append(collapse(pre, new«", stream" if plan.lane_map.splits else ""»))
#: endif

#: if plan.delayed
        for index in range(self.group):
#: if plan.trips > 1
            own = collapsed[index * TRIPS : (index + 1) * TRIPS]
            square = square_sum([word for c in own for word in c])
#: else
            square = square_sum(collapsed[index])
#: endif
#: if plan.lane_map.merges
            # Of the lanes that share a word, one counts its squares and stores it.
            square = cutlass.select_(stream % WORD_LANES == 0, square, Float32(0.0))
#: endif
            totals.append(sum_warp(square))
        if lane == 0:
            for index in cutlass.range_constexpr(self.group):
                partials[warp, index, NORM_SQUARES] = totals[index]
#: endif

        # Step 3 over the warp «plan.projection_means», over the block by lane k for sum k,
        # over the cluster by all its blocks alike.
        cute.arch.sync_warp()
#: if plan.projection == "fma"
        for index in cutlass.range(count):
#: if plan.trips > 1
            place = shares[0].stash + index * STASH_TOKEN
#: if plan.fn_home == "shared"
            token_sums = project(
                fn_place, place, self.group * STASH_TOKEN, lane, self.threads
            )
#: else
            token_sums = project(
                fn_stream,
                first_fragment,
                place,
                self.group * STASH_TOKEN,
                lane,
                self.threads,
            )
#: endif
#: else
            new = ptx.load_shared(share.stash + index * STASH_TOKEN)
#: if plan.fn_home == "registers"
            token_sums = project(rows, new, lane)
#: elif plan.fn_home == "shared"
            token_sums = project(fn_place, new, lane, self.threads)
#: else
            token_sums = project(fn_address, new, lane)
#: endif
#: endif
            store_sums(partials[warp, index, None], token_sums, lane)
#: else
        lane_tokens = [
            cutlass.min(octet * 8 + lane // 4, count - 1)
            for octet in range((self.group + 7) // 8)
        ]
        chunk_stash = warp_stash + lane % 4 * FRAGMENT_BYTES
#: if plan.fn_home == "shared"
        rows = read_projection(fn_place, self.threads)
#: elif plan.fn_home == "global"
#: if plan.idle_lanes
        rows = stream_projection(fn_address, warp_column + lane % 4, self.threads)
#: else
        rows = stream_projection(fn_address, self.threads)
#: endif
#: endif
        token_sums = project(
            rows,
            [chunk_stash + token * STASH_TOKEN for token in lane_tokens],
#: if plan.trips > 1
            self.group * STASH_TOKEN,
#: endif
        )
        store_sums(partials[warp, None, None], token_sums, lane, count)
#: endif
        self.sync()
        self.send_sums(call, partials)

        # While the sums are under way.
        for index, share in items:
            present = «"share.own & " if plan.idle_lanes else ""»(index < count)
#: if plan.tp > 1
            slot = slots + (tokens[index] * ROW_BYTES + share.column)
            for source in range(POLLS):
                ptx.store_fragment_if(present, slot + source * SLOT_BYTES, SENTINELS)
#: endif
            ptx.store_fragment_if(
                present,
                call.new_residual.iterator.toint()
                + Int64(tokens[index] * TOKEN_BYTES)
                + (stream * ROW_BYTES + share.column),
                ptx.load_shared(share.stash + index * STASH_TOKEN),
            )
#: if plan.stream_mean
        self.store_means(call, items, tokens, stream)
#: endif
        wait_for_sums(call.arrived)
#: if plan.delayed
#: if not plan.tail
        self.store_mix(call)
#: endif
        known = [cutlass.min(index, count - 1) for index in range(self.group)]
#: else

        # Steps 4 and 5.
        known = [cutlass.min(index, count - 1) for index in range(self.group)]
        collapsed = []
        totals = []
        for token in known:
            rstd = row_rstd(sum_peers(call.sums[token, SQUARES, None], self.cluster_size))
            dot = sum_peers(call.sums[token, stream, None], self.cluster_size)
            pre = pre_mix(dot * rstd, pre_scale, pre_base)
#: if plan.trips > 1
            words = [ptx.load_shared(share.stash + token * STASH_TOKEN) for share in shares]
            collapsed.append([collapse(pre, new«", stream" if plan.lane_map.splits else ""») for new in words])
            square = square_sum([word for c in collapsed[-1] for word in c])
#: else
            new = ptx.load_shared(share.stash + token * STASH_TOKEN)
            collapsed.append(collapse(pre, new«", stream" if plan.lane_map.splits else ""»))
            square = square_sum(collapsed[-1])
#: endif
#: if plan.lane_map.merges
            # Of the lanes that share a word, one counts its squares and stores it.
            square = cutlass.select_(stream % WORD_LANES == 0, square, Float32(0.0))
#: endif
            totals.append(sum_warp(square))
        if lane == 0:
            for index in cutlass.range_constexpr(self.group):
                squares[index, warp] = totals[index]
        self.sync()
        self.send_squares(call, squares)
#: if not plan.tail
        self.store_mix(call)
#: endif
        wait_for_sums(call.arrived + 8)
#: endif
        output = cute.recast_tensor(call.layer_input, Uint32)
        for index in cutlass.range_constexpr(self.group):
#: if plan.delayed
            total = sum_peers(call.sums[known[index], NORM_SQUARES, None], self.cluster_size)
#: else
            total = sum_peers(call.norms[known[index], None], self.cluster_size)
#: endif
#: if plan.trips > 1
            for trip in cutlass.range_constexpr(TRIPS):
                share = shares[trip]
                normalized = normalize(collapsed[«"index * TRIPS + trip" if plan.delayed else "index][trip"»], total«", share.norm_weight" if plan.norm_weight != "none" else ""»)
                if «"share.own and " if plan.idle_lanes else ""»«"stream % WORD_LANES == 0 and " if plan.lane_map.merges else ""»index < count:
                    for word in cutlass.range_constexpr(LANE_WORDS):
                        output[tokens[index], share.first_word + word] = normalized[word]
#: else
            normalized = normalize(collapsed[index], total«", share.norm_weight" if plan.norm_weight != "none" else ""»)
            if «"share.own and " if plan.idle_lanes else ""»«"stream % WORD_LANES == 0 and " if plan.lane_map.merges else ""»index < count:
                for word in cutlass.range_constexpr(LANE_WORDS):
                    output[tokens[index], share.first_word + word] = normalized[word]
#: endif
#: if plan.tp > 1

        if cutlass.const_expr(self.publishes is None):
            # The publish before this kernel has read the generation, too.
            cute.arch.griddepcontrol_wait()
        if thread == 0 and arrival == last:
            state[0] = (generation + 1) % GENERATIONS
#: endif

    def share(self, call, warp_stash«", trip" if plan.trips > 1 else ""»):
        """A thread's fragment of its stream, and where it keeps it for each token."""
        thread = cute.arch.thread_idx()[0]
        stream = thread % HC
        fragment = cute.arch.block_idx()[0] * self.fragments + thread // HC
        streams = warp_stash + cute.arch.lane_idx() // HC * FRAGMENT_BYTES
#: if plan.trips > 1
        fragment = fragment + trip * (self.threads // HC)
        streams = streams + trip * (self.group * STASH_TOKEN)
#: endif
#: if plan.idle_lanes
        # Idle lanes stay beside the last fragment: they may load it.
        own = fragment < FRAGMENTS
        fragment = cutlass.min(fragment, FRAGMENTS - 1)
#: endif
#: if plan.lane_map.merges
        first_word = fragment * FRAGMENT_WORDS + stream // WORD_LANES
#: else
        first_word = fragment * FRAGMENT_WORDS + stream * LANE_WORDS
#: endif
#: if plan.norm_weight != "none"
        norm_words = cute.recast_tensor(call.norm_weight, Uint32)
#: endif
        return SimpleNamespace(
#: if plan.idle_lanes
            own=own,
#: endif
#: if plan.projection == "fma"
            fragment=fragment,
#: endif
            column=fragment * FRAGMENT_BYTES,
            streams=streams,
            stash=streams + stream * STASH_STREAM,
            first_word=first_word,
#: if plan.norm_weight != "none"
            norm_weight=[norm_words[first_word + word] for word in range(LANE_WORDS)],
#: endif
        )

    @cute.jit
    def sync(self):
#: if plan.tail
        """Meets the block's other warps, but for the one of the mixes."""
        cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)
#: else
        """Meets the block's other warps."""
        cute.arch.sync_threads()
#: endif
#: if plan.tp > 1

    def destinations(self, call, stream):
        """Where this lane sends to: the mailboxes of the ranks that are its own."""
        if self.publishes is None:
            return []
        if self.publishes == "multicast":
            return [call.mailboxes[0]]
        ranks = [stream + turn for turn in range(0, TP, HC)]
        return [call.mailboxes[cutlass.min(rank, TP - 1)] for rank in ranks]

    def publish(self, call, batch, tokens, destinations, generation, stream):
        """Sends this rank's rows of some tokens to every rank."""
        rows = [
            ptx.load_l2(
                call.x.iterator.toint()
                + Int64(tokens[index] * ROW_BYTES + share.column)
            )
            for index, share in batch
        ]
        slot = Int64(generation) * GENERATION_BYTES + call.rank * SLOT_BYTES
        for words, (index, share) in zip(rows, batch, strict=True):
            payload = sanitize(words)
            offset = slot + (tokens[index] * ROW_BYTES + share.column)
            present = «"share.own & " if plan.idle_lanes else ""»(index < call.count)
            if self.publishes == "multicast":
                once = present & (stream == 0)
                ptx.store_multicast_«plan.pair_type»_if(once, destinations[0] + offset, payload)
            else:
                for turn, mailbox in enumerate(destinations):
                    own = present & (stream + turn * HC < TP)
                    ptx.store_fragment_if(own, mailbox + offset, payload)
#: endif

    def load_weights(self, call):
        """Loads the mixes that weigh the tokens' streams, shared out to the threads."""
        places = []
        for turn in range(0, self.group * WEIGHTS, self.threads):
            # Threads beyond the last weight repeat it, to no effect.
            place = turn + cute.arch.thread_idx()[0]
            place = cutlass.min(place, call.count * WEIGHTS - 1)
            token, number = call.first + place // WEIGHTS, place % WEIGHTS
            post = call.post.iterator.toint() + Int64(token * HC + number) * FLOAT_BYTES
            comb = (
                call.comb.iterator.toint()
                + Int64(token * (HC * HC) + number - HC) * FLOAT_BYTES
            )
            address = cutlass.select_(number < HC, post, comb)
#: if plan.delayed
            pre = (
                call.pre.iterator.toint()
                + Int64(token * HC + number - HC - HC * HC) * FLOAT_BYTES
            )
            address = cutlass.select_(number < HC + HC * HC, address, pre)
#: endif
            places.append((place, ptx.load_float_l2(address)))
        return places

#: if plan.stream_mean
    @cute.jit
    def store_means(self, call, items, tokens, stream):
        """Stores the mean of the new streams."""
        output = cute.recast_tensor(call.stream_mean, Uint32)
        for index, share in items:
            new = ptx.load_shared(share.stash + index * STASH_TOKEN)
            means = stream_means(new«", stream" if plan.lane_map.splits else ""»)
            if «"share.own and " if plan.idle_lanes else ""»«"stream % WORD_LANES == 0 and " if plan.lane_map.merges else ""»index < call.count:
                for word in cutlass.range_constexpr(LANE_WORDS):
                    output[tokens[index], share.first_word + word] = means[word]

#: endif
    @cute.jit
    def send_sums(self, call, partials: cute.Tensor):
        """Sends the block's sums to the blocks of the cluster that need them.

#: if plan.delayed
        A warp serves one token at a time. All need the squares; the mixes go to the
        block that takes the token's.
#: else
        A warp serves one token at a time. All need the pre-mix and the squares; the
        rest goes to the block that takes the token's mixes.
#: endif
        """
        block = cute.arch.block_idx()[0]
        for turn in cutlass.range_constexpr(0, self.group, self.warps):
            token = turn + cute.arch.warp_idx()
            for first_sum in cutlass.range_constexpr(0, LAST_SUM + 1, 32):
                number = first_sum + cute.arch.lane_idx()
                if token < call.count and number <= LAST_SUM:
                    total = sum_row(partials[None, token, number], self.warps)
                    place = call.sums[token, number, None].iterator.toint() + block * 4
                    if «'' if plan.delayed else 'number < HC or '»number >= SQUARES:
                        for peer in cutlass.range_constexpr(self.cluster_size):
                            ptx.store_async(place, call.arrived, peer, total)
                    elif number < MIX:
                        peer = token % self.cluster_size
                        ptx.store_async(place, call.arrived, peer, total)

#: if not plan.delayed
    @cute.jit
    def send_squares(self, call, squares: cute.Tensor):
        """Sends the square sums of the block's part of the collapse to every block."""
        block = cute.arch.block_idx()[0]
        pairs = self.group * self.cluster_size
        for turn in cutlass.range_constexpr(0, pairs, self.threads):
            pair = turn + cute.arch.thread_idx()[0]
            token = pair // self.cluster_size
            if token < call.count:
                total = sum_row(squares[token, None], self.warps)
                place = call.norms[token, None].iterator.toint() + block * 4
                peer = pair % self.cluster_size
                ptx.store_async(place, call.arrived + 8, peer, total)

#: endif
    @cute.jit
#: if plan.tail
    def mix_tokens(self, call):
        """Takes the tokens whose mixes are this block's through steps «"4, " if plan.delayed else ""»6 and 7.

        One warp does: its lanes share the logits, then each takes one token.
        """
        block = cute.arch.block_idx()[0]
        lane = cute.arch.lane_idx()
        logits = call.memory.allocate_tensor(Float32, row_major(self.group, MIX), 16)
        numbers = [first + lane for first in range(«"0" if plan.delayed else "HC"», MIX, 32)]
        parts = [cutlass.min(number // HC, 2) for number in numbers]
        gains = [call.scale[part] for part in parts]
        offsets = [call.base[cutlass.min(number, MIX - 1)] for number in numbers]
        cute.arch.cluster_wait()
        # The outputs may be memory that a kernel before this one reads.
        cute.arch.griddepcontrol_wait()
        wait_for_sums(call.arrived)
        for turn in cutlass.range_constexpr(0, self.group, self.cluster_size):
            token = turn + block
            if token < call.count:
                squares = sum_peers(call.sums[token, SQUARES, None], self.cluster_size)
                rstd = row_rstd(squares)
                for part in cutlass.range_constexpr(len(numbers)):
                    if numbers[part] < MIX:
                        row = call.sums[token, numbers[part], None]
                        mix = sum_peers(row, self.cluster_size) * rstd
                        logits[token, numbers[part]] = ptx.fma(
                            mix, gains[part], offsets[part]
                        )
        cute.arch.sync_warp()
        token = lane * self.cluster_size + block
        if token < call.count:
            place = call.first + token
            store_mixes(
                [logits[token, number] for number in range(MIX)],
                call.new_post[place, None, 0],
                call.new_comb[place, None, None],
#: if plan.delayed
                call.new_pre[place, None],
#: endif
            )
#: else
    def store_mix(self, call):
        """Stores the mixes of the tokens whose mixes are ours, for the side stream."""
        block = cute.arch.block_idx()[0]
        sums, mix, first = call.sums, call.mix, call.first
        for turn in cutlass.range_constexpr(0, self.group, self.cluster_size):
            token = turn + block
            for first_mix in cutlass.range_constexpr(0, MIX, self.threads):
                number = first_mix + cute.arch.thread_idx()[0]
                if token < call.count and number < MIX:
                    squares = sum_peers(sums[token, SQUARES, None], self.cluster_size)
                    dot = sum_peers(sums[token, number, None], self.cluster_size)
                    mix[first + token, number] = dot * row_rstd(squares)
#: endif


def batches(items, size):
    """Cuts a list into lists of ``size`` and a rest."""
    return [items[start : start + size] for start in range(0, len(items), size)]
