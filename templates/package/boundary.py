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
    FN_ROW_BYTES,
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
from .signature import SmemAllocator, boundary_arguments
from .steps import (
    FLOAT_BYTES,
    collapse,
    copy_projection,
    load_arrivals,
    load_projection,
    normalize,
    poll_ranks,
    post_mix,
    pre_mix,
    project,
    read_projection,
    row_major,
    row_rstd,
    sanitize,
    square_sum,
    store_sums,
    stream_projection,
    sum_peers,
    sum_ranks,
    sum_row,
    sum_warp,
    unpack,
    wait_for_sums,
    zero_unless,
)

WEIGHTS = HC + HC * HC  # of a token: its post-mix, then its residual mix
#: if plan.tp > 1
SENTINELS = [0x80008000] * FRAGMENT_WORDS
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
        x: cute.Tensor | None,  # [M, HIDDEN] BF16, this rank's partial rows
        mailboxes: cute.Tensor | None,  # [destinations] addresses of mailboxes
        rank: Int32,
#: else
        x: cute.Tensor,  # [M, HIDDEN] BF16
#: endif
        residual: cute.Tensor,  # [M, HC, HIDDEN] BF16
        post: cute.Tensor,  # [M, HC, 1] FP32
        comb: cute.Tensor,  # [M, HC, HC] FP32, [source, target]
        fn: cute.Tensor,  # [MIX, HC * HIDDEN] BF16
        scale: cute.Tensor,  # [3] FP32
        base: cute.Tensor,  # [MIX] FP32
        norm_weight: cute.Tensor,  # [HIDDEN] BF16
#: if plan.tp > 1
        mailbox: cute.Tensor,  # [GENERATIONS, TP, CAPACITY, HIDDEN] BF16
        state: cute.Tensor,  # [2] generation, arrivals
#: endif
        new_residual: cute.Tensor,  # [M, HC, HIDDEN] BF16, out
#: if plan.tail
        new_post: cute.Tensor,  # [M, HC, 1] FP32, out
        new_comb: cute.Tensor,  # [M, HC, HC] FP32, out
#: else
        mix: cute.Tensor,  # [M, MIX] FP32, out
#: endif
        layer_input: cute.Tensor,  # [M, HIDDEN] BF16, out
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
            fn,
            scale,
            base,
            norm_weight,
#: if plan.tp > 1
            mailbox,
            state,
#: endif
            new_residual,
#: if plan.tail
            new_post,
            new_comb,
#: else
            mix,
#: endif
            layer_input,
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
        fn: cute.Tensor,
        scale: cute.Tensor,
        base: cute.Tensor,
        norm_weight: cute.Tensor,
#: if plan.tp > 1
        mailbox: cute.Tensor,
        state: cute.Tensor,
#: endif
        new_residual: cute.Tensor,
#: if plan.tail
        new_post: cute.Tensor,
        new_comb: cute.Tensor,
#: else
        mix: cute.Tensor,
#: endif
        layer_input: cute.Tensor,
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
        norms = memory.allocate_tensor(
            Float32, row_major(self.group, self.cluster_size), 16
        )
        arrived = memory.allocate(16, 16).toint()
        if thread == 0:
            # One barrier for the sums, one for the norms; each has one phase.
            ptx.init_barrier(arrived)
            ptx.init_barrier(arrived + 8)
            ptx.fence_barriers()
            own_tokens = (count + self.cluster_size - 1 - block) // self.cluster_size
            values = count * SHARED_SUMS + own_tokens * OWN_SUMS
            ptx.expect_bytes(arrived, values * (self.cluster_size * FLOAT_BYTES))
            ptx.expect_bytes(arrived + 8, count * (self.cluster_size * FLOAT_BYTES))
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
            fn=fn,
            scale=scale,
            base=base,
            norm_weight=norm_weight,
            new_residual=new_residual,
#: if not plan.tail
            mix=mix,
#: endif
            layer_input=layer_input,
            memory=memory,
            sums=sums,
            norms=norms,
            arrived=arrived,
            first=first,
            count=count,
        )
#: if plan.tail
        mixed = memory.allocate_tensor(Float32, row_major(self.group, MIX), 16)
        if cute.arch.warp_idx() < self.warps:
            self.take_tokens(call)
        else:
            cute.arch.cluster_wait()
            # The outputs may be memory that a kernel before this one reads.
            cute.arch.griddepcontrol_wait()
            wait_for_sums(arrived)
            self.store_logits(call, mixed)
            cute.arch.sync_warp()
            index = cute.arch.lane_idx() * self.cluster_size + block
            if index < count:
                token = first + index
                store_mixes(mixed[index, None], new_post[token, None, 0], new_comb[token, None, None])
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
        squares = call.memory.allocate_tensor(
            Float32, row_major(self.group, self.warps), 16
        )
        warp_stash = stash.toint() + warp * («"TRIPS * " if plan.trips > 1 else ""»self.group * STASH_TOKEN)
#: if plan.trips > 1
        shares = [self.share(call, warp_stash, trip) for trip in range(TRIPS)]
        items = [(index, share) for index in range(self.group) for share in shares]
#: else
        share = self.share(call, warp_stash)
        items = [(index, share) for index in range(self.group)]
#: endif

        # Weights: no kernel writes them.
        warp_column = block * self.fragments + warp * FRAGMENTS_PER_WARP
#: if plan.fn_home == "shared"
        fn_stash = call.memory.allocate(self.threads * FN_BYTES, 16)
        fn_place = fn_stash.toint() + thread * FRAGMENT_BYTES
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
        pre_scale = call.scale[0]
        pre_base = call.base[stream]
#: if plan.tp > 1
        destinations = self.destinations(call, stream)

        if cutlass.const_expr(self.publishes is not None):
            cute.arch.griddepcontrol_wait()
        # Otherwise the publish before this kernel has triggered after its own wait, so
        # what earlier kernels wrote is complete; what it sends announces itself.
        state = call.state.iterator.toint()
        generation = ptx.load_int_relaxed(state)
        # The last block to have read the generation advances it when it ends.
        arrival = Uint32(0)
        last = cute.arch.grid_dim()[1] * self.cluster_size - 1
        if thread == 0:
            arrival = ptx.count_arrival(state + 4, last + (generation & 0))
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

        # Step 3 over the warp on tensor cores, over the block by lane k for sum k, over
        # the cluster by all its blocks alike.
        cute.arch.sync_warp()
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
        wait_for_sums(call.arrived)

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
        output = cute.recast_tensor(call.layer_input, Uint32)
        for index in cutlass.range_constexpr(self.group):
            total = sum_peers(call.norms[known[index], None], self.cluster_size)
#: if plan.trips > 1
            for trip in cutlass.range_constexpr(TRIPS):
                share = shares[trip]
                normalized = normalize(collapsed[index][trip], total, share.norm_weight)
                if «"share.own and " if plan.idle_lanes else ""»«"stream % WORD_LANES == 0 and " if plan.lane_map.merges else ""»index < count:
                    for word in cutlass.range_constexpr(LANE_WORDS):
                        output[tokens[index], share.first_word + word] = normalized[word]
#: else
            normalized = normalize(collapsed[index], total, share.norm_weight)
            if «"share.own and " if plan.idle_lanes else ""»«"stream % WORD_LANES == 0 and " if plan.lane_map.merges else ""»index < count:
                for word in cutlass.range_constexpr(LANE_WORDS):
                    output[tokens[index], share.first_word + word] = normalized[word]
#: endif
#: if plan.tp > 1

        if cutlass.const_expr(self.publishes is None):
            # The publish before this kernel has read the generation, too.
            cute.arch.griddepcontrol_wait()
        if thread == 0 and arrival == last:
            call.state[0] = (generation + 1) % GENERATIONS
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
        norm_words = cute.recast_tensor(call.norm_weight, Uint32)
        return SimpleNamespace(
#: if plan.idle_lanes
            own=own,
#: endif
            column=fragment * FRAGMENT_BYTES,
            streams=streams,
            stash=streams + stream * STASH_STREAM,
            first_word=first_word,
            norm_weight=[norm_words[first_word + word] for word in range(LANE_WORDS)],
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
                ptx.store_multicast_if(once, destinations[0] + offset, payload)
            else:
                for turn, mailbox in enumerate(destinations):
                    own = present & (stream + turn * HC < TP)
                    ptx.store_fragment_if(own, mailbox + offset, payload)
#: endif

    def load_weights(self, call):
        """Loads the post-mix and the residual mix of the tokens, shared by threads."""
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
            places.append((place, ptx.load_float_l2(address)))
        return places

    @cute.jit
    def send_sums(self, call, partials: cute.Tensor):
        """Sends the block's sums to the blocks of the cluster that need them.

        A warp serves one token at a time. All need the pre-mix and the squares; the
        rest goes to the block that takes the token's mixes.
        """
        block = cute.arch.block_idx()[0]
        for turn in cutlass.range_constexpr(0, self.group, self.warps):
            token = turn + cute.arch.warp_idx()
            for first_sum in cutlass.range_constexpr(0, LAST_SUM + 1, 32):
                number = first_sum + cute.arch.lane_idx()
                if token < call.count and number <= LAST_SUM:
                    total = sum_row(partials[None, token, number], self.warps)
                    place = call.sums[token, number, None].iterator.toint() + block * 4
                    if number < HC or number >= SQUARES:
                        for peer in cutlass.range_constexpr(self.cluster_size):
                            ptx.store_async(place, call.arrived, peer, total)
                    elif number < MIX:
                        peer = token % self.cluster_size
                        ptx.store_async(place, call.arrived, peer, total)

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

    @cute.jit
#: if plan.tail
    def store_logits(self, call, mixed: cute.Tensor):
        """Stores the logits of steps 6 and 7, for the tokens whose mixes are ours."""
        block = cute.arch.block_idx()[0]
        for turn in cutlass.range_constexpr(0, self.group, self.cluster_size):
            token = turn + block
            for first_mix in cutlass.range_constexpr(HC, MIX, 32):
                number = first_mix + cute.arch.lane_idx()
                if token < call.count and number < MIX:
                    squares = sum_peers(call.sums[token, SQUARES, None], self.cluster_size)
                    dot = sum_peers(call.sums[token, number, None], self.cluster_size)
                    part = 2
                    if number < 2 * HC:
                        part = 1
                    mixed[token, number] = ptx.fma(
                        dot * row_rstd(squares), call.scale[part], call.base[number]
                    )
#: else
    def store_mix(self, call):
        """Stores the mixes of the tokens whose mixes are ours, for the side stream."""
        block = cute.arch.block_idx()[0]
        for turn in cutlass.range_constexpr(0, self.group, self.cluster_size):
            token = turn + block
            for first_mix in cutlass.range_constexpr(0, MIX, self.threads):
                number = first_mix + cute.arch.thread_idx()[0]
                if token < call.count and number < MIX:
                    squares = sum_peers(call.sums[token, SQUARES, None], self.cluster_size)
                    dot = sum_peers(call.sums[token, number, None], self.cluster_size)
                    call.mix[call.first + token, number] = dot * row_rstd(squares)
#: endif


def batches(items, size):
    """Cuts a list into lists of ``size`` and a rest."""
    return [items[start : start + size] for start in range(0, len(items), size)]
