// SPDX-License-Identifier: Apache-2.0
// A pipeline of combine in the shared memory of a block (src/cuda/combine/row_pipeline.cuh and
// row_warps.cuh): one warp loads, two add. None of its waits has a deadline of its own.
//
// Checked: an adding warp reads the item and the rows that are meant for it, nothing is overwritten
// while it is still to be read, and every wait ends, also where the loader gives up before any item
// because a peer has not come by the deadline (Source::wait).
//
// A barrier is an mbarrier: it counts arrivals, and turns its phase when all have come. Who waits
// names the parity of a phase; the phase before the first counts as complete. Copies are the
// engine's: those under way end in any order, and one that ends counts as the arrival. A warp is
// one process: its lanes agree before each arrival. Left out: pieces of a row, and the warp that
// signals, which looks at the stop flag.
//
// Mutations, each of which makes the check fail:
//   NO_ITEM_WAIT      the loader writes an item without waiting for its place
//   NO_STAGE_WAIT     the loader loads a row without waiting for its stage
//   WAITS_FOR_FIRST   of the stages that it loads together, the loader waits for the first
//   NO_ROW_WAIT       an adding warp reads a row without waiting for it
//   ARRIVES_FIRST     an adding warp arrives at a stage before it has read it, as it may while its
//                     loads are under way: a fence has to stand before the arrival
//   ONE_ADDER_COUNTS  a stage counts as free when one of the adding warps has arrived
//   NO_END            a loader that gives up leaves without an item that says so
#ifndef ITEMS
#define ITEMS 4
#endif
#define ADDERS 2
#define SLOTS 2   // items that the loader may be ahead
#define STAGES 3
#define BATCH 2   // stages that it waits for together
#define MOST_ROWS 3

#define ITEM_FULL 0
#define ITEM_EMPTY SLOTS
#define ROW_FULL (2 * SLOTS)
#define ROW_EMPTY (2 * SLOTS + STAGES)
#define BARRIERS (2 * SLOTS + 2 * STAGES)

bit phase[BARRIERS];
byte arrived[BARRIERS];

#ifdef ONE_ADDER_COUNTS
#define READERS_OF_A_STAGE 1
#else
#define READERS_OF_A_STAGE ADDERS
#endif

inline arrive(barrier, all) {
  d_step {
    arrived[barrier]++;
    if
    :: arrived[barrier] == all -> arrived[barrier] = 0; phase[barrier] = 1 - phase[barrier]
    :: else
    fi
  }
}
#define IS_COMPLETE(barrier, parity) (phase[barrier] != (parity))

// What is in shared memory: the number of an item, its rows, and of each stage the row in it.
byte item[SLOTS];
byte rows_of[SLOTS];
bool is_end[SLOTS];
byte row_in[STAGES];
byte loading[STAGES];  // the row on its way, or 0

inline advance(place, parity, count) {
  d_step {
    place++;
    if
    :: place == count -> place = 0; parity = 1 - parity
    :: else
    fi
  }
}

active proctype engine() {
end:
  do
  :: d_step { loading[0] != 0 -> row_in[0] = loading[0]; loading[0] = 0; phase[ROW_FULL] = 1 - phase[ROW_FULL] }
  :: d_step { loading[1] != 0 -> row_in[1] = loading[1]; loading[1] = 0; phase[ROW_FULL + 1] = 1 - phase[ROW_FULL + 1] }
  :: d_step { loading[2] != 0 -> row_in[2] = loading[2]; loading[2] = 0; phase[ROW_FULL + 2] = 1 - phase[ROW_FULL + 2] }
  od
}

active proctype loader() {
  byte n;      // items so far
  byte row;    // rows so far; the first is 1
  byte slot;
  bit slot_parity;
  byte stage;
  bit stage_parity;
  byte rows;
  byte together;
  byte last;
  bit last_parity;
  bool is_there;
  do
  ::
     if
     :: n < ITEMS -> is_there = true
     :: is_there = false  // none is left, or it gives up
     fi;
     rows = 0;
     do
     :: is_there && rows < MOST_ROWS -> rows++
     :: break
     od;
#ifdef NO_END
     if
     :: !is_there && n < ITEMS -> break
     :: else
     fi;
#endif
#ifndef NO_ITEM_WAIT
     IS_COMPLETE(ITEM_EMPTY + slot, 1 - slot_parity);
#endif
     n++;
     item[slot] = n;
     rows_of[slot] = rows;
     is_end[slot] = !is_there;
     arrive(ITEM_FULL + slot, 1);
     advance(slot, slot_parity, SLOTS);
     if
     :: !is_there -> break
     :: else
     fi;
     do
     :: rows > 0 ->
        d_step {
          together = (rows < BATCH -> rows : BATCH);
          last = stage + together - 1;
          last_parity = stage_parity;
          if
          :: last >= STAGES -> last = last - STAGES; last_parity = 1 - stage_parity
          :: else
          fi;
#ifdef WAITS_FOR_FIRST
          last = stage;
          last_parity = stage_parity;
#endif
        }
#ifndef NO_STAGE_WAIT
        IS_COMPLETE(ROW_EMPTY + last, 1 - last_parity);
#endif
        do
        :: together > 0 ->
           d_step {
             row++;
             row_in[stage] = 0;  // neither the old row nor the new one
             loading[stage] = row
           };
           advance(stage, stage_parity, STAGES);
           together--;
           rows--
        :: together == 0 -> break
        od
     :: rows == 0 -> break
     od
  od
}

active [ADDERS] proctype adder() {
  byte n;
  byte row;
  byte slot;
  bit slot_parity;
  byte stage;
  bit stage_parity;
  byte left;
  do
  ::
     IS_COMPLETE(ITEM_FULL + slot, slot_parity);
     n++;
     assert(item[slot] == n);
     if
     :: is_end[slot] -> break
     :: else
     fi;
     left = rows_of[slot];
     do
     :: left > 0 ->
        row++;
#ifndef NO_ROW_WAIT
        IS_COMPLETE(ROW_FULL + stage, stage_parity);
#endif
#ifdef ARRIVES_FIRST
        arrive(ROW_EMPTY + stage, READERS_OF_A_STAGE);
        assert(row_in[stage] == row);
#else
        assert(row_in[stage] == row);
        arrive(ROW_EMPTY + stage, READERS_OF_A_STAGE);
#endif
        advance(stage, stage_parity, STAGES);
        left--
     :: left == 0 -> break
     od;
     assert(item[slot] == n);
     arrive(ITEM_EMPTY + slot, ADDERS);
     advance(slot, slot_parity, SLOTS)
  od
}
