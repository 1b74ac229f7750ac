// SPDX-License-Identifier: Apache-2.0
// Plans of captured calls among eager ones on one rank (src/cuda/memory/pools.hpp, take_plan of
// src/cuda/plan/call.cpp, set_own_word of src/cuda/device/call_setup.cuh, and the exchanges that
// python/weft/exchange_begin.py keeps): which plan lies in a block, and who may free what a graph
// still uses.
//
// Checked: a combine that is not refused reads the plan it was given, as the last run of that
// plan's call has made it; an eager plan that was made is never refused, whatever is replayed; nor
// is a plan inside the graph that makes it; and no replay uses memory that was freed.
//
// One stream runs everything in order, so a step is atomic. A plan's call may be given up, which
// clears its block. Left out: ranks, which take the same steps; `losses` has calls that end early.
//
// Mutations, each of which makes the check fail:
//   COMMON_POOL     a block that a captured call took serves eager calls once the host drops it
//   TAKES_ANY       an eager call takes a graph's block where no other is left
//   NO_SERIAL       a call does not compare its plan's number with that in the block
//   NOT_CLEARED     a plan's call that is given up leaves the block as it was
//   FREES_OUTGROWN  an exchange goes when a larger one replaces it and no handle keeps it
#ifndef STEPS
#define STEPS 6
#endif
#define EXCHANGES 2
#define BLOCKS 2               // of an exchange
#define ALL (EXCHANGES * BLOCKS)
#define GRAPHS 3
#define HANDLES 2              // that the host holds at a time
#define NONE 255

mtype = { unused, held, in_graphs };
mtype pool[ALL] = unused;
byte holds[ALL];               // number of the plan in the block, 0: none
bool is_fresh[ALL];            // it is of the last run of that plan's call
bool is_freed[EXCHANGES];
byte current;                  // exchange
byte last_plan;

typedef Handle { byte block = NONE; byte plan; bool was_made; bool is_captured }
Handle handles[HANDLES];
typedef Graph { byte block = NONE; byte plan; bool makes; bool combines }
Graph graphs[GRAPHS];

byte block;
byte i;
bool is_kept;

#define EXCHANGE(b) ((b) / BLOCKS)

// `block` becomes an unused one of the current exchange, or NONE.
inline take(captures) {
  block = NONE;
  for (i : 0 .. BLOCKS - 1) {
    if
    :: block == NONE && captures && pool[current * BLOCKS + i] == in_graphs -> block = current * BLOCKS + i
    :: else
    fi
  }
  for (i : 0 .. BLOCKS - 1) {
    if
    :: block == NONE && pool[current * BLOCKS + i] == unused -> block = current * BLOCKS + i
    :: else
    fi
  }
#ifdef TAKES_ANY
  for (i : 0 .. BLOCKS - 1) {
    if
    :: block == NONE && pool[current * BLOCKS + i] == in_graphs -> block = current * BLOCKS + i
    :: else
    fi
  }
#endif
  if
  :: block != NONE -> pool[block] = held; last_plan++
  :: else
  fi
}

inline give_back(at, captured) {
#ifdef COMMON_POOL
  pool[at] = unused;
#else
  pool[at] = (captured -> in_graphs : unused);
#endif
}

// The plan's call runs.
inline make(at, nr) {
  assert(!is_freed[EXCHANGE(at)]);
  holds[at] = nr;
  is_fresh[at] = true
}
inline give_up(at, nr) {
  assert(!is_freed[EXCHANGE(at)]);
#ifdef NOT_CLEARED
  is_fresh[at] = false
#else
  holds[at] = 0
#endif
}

// A combine by the plan. `must_pass`: it has to go through.
inline combine(at, nr, must_pass) {
  assert(!is_freed[EXCHANGE(at)]);
  assert(!(must_pass) || (holds[at] == nr && is_fresh[at]));
#ifndef NO_SERIAL
  if
  :: holds[at] == nr ->
#endif
     assert(holds[at] == nr && is_fresh[at])
#ifndef NO_SERIAL
  :: else  // refused
  fi
#endif
}

// Exchanges that nothing keeps go.
inline free_outgrown() {
  byte x;
  for (x : 0 .. EXCHANGES - 1) {
    is_kept = x >= current;
    for (i : 0 .. HANDLES - 1) {
      is_kept = is_kept || (handles[i].block != NONE && EXCHANGE(handles[i].block) == x)
    }
#ifndef FREES_OUTGROWN
    for (i : 0 .. GRAPHS - 1) {
      is_kept = is_kept || (graphs[i].block != NONE && EXCHANGE(graphs[i].block) == x)
    }
#endif
    is_freed[x] = !is_kept
  }
}

inline drop(what) {
  give_back(handles[what].block, handles[what].is_captured);
  handles[what].block = NONE;
  handles[what].plan = 0;
  handles[what].was_made = false;
  handles[what].is_captured = false;
  free_outgrown()
}

active proctype rank() {
  byte step;
  byte h;
  byte g;
  byte b;
  byte number;
  do
  :: step == STEPS -> break
  :: step < STEPS -> atomic {
       step++;
       h = 0;
       do :: h < HANDLES - 1 -> h++ :: break od;
       g = 0;
       do :: g < GRAPHS - 1 -> g++ :: break od;
       if
       // Eager calls.
       :: handles[h].block == NONE ->
          take(false);
          if
          :: block == NONE  // more memory would be asked for
          :: block != NONE ->
             handles[h].block = block;
             handles[h].plan = last_plan;
             if
             :: make(block, last_plan); handles[h].was_made = true
             :: give_up(block, last_plan)
             fi
          fi
       :: handles[h].block != NONE ->
          combine(handles[h].block, handles[h].plan, handles[h].was_made)
       :: handles[h].block != NONE -> drop(h)
       // Captures, which run nothing: all of a layer, the handle dropped; or the plan, whose handle
       // is kept; or a combine by such a plan.
       :: graphs[g].block == NONE ->
          take(true);
          if
          :: block == NONE
          :: block != NONE ->
             graphs[g].block = block;
             graphs[g].plan = last_plan;
             graphs[g].makes = true;
             if
             :: graphs[g].combines = true; give_back(block, true)
             :: handles[h].block == NONE ->
                handles[h].block = block;
                handles[h].plan = last_plan;
                handles[h].is_captured = true
             :: handles[h].block != NONE -> give_back(block, true)
             fi
          fi
       :: graphs[g].block == NONE && handles[h].block != NONE && handles[h].is_captured ->
          graphs[g].block = handles[h].block;
          graphs[g].plan = handles[h].plan;
          graphs[g].combines = true
       // A replay.
       :: graphs[g].block != NONE ->
          b = graphs[g].block;
          number = graphs[g].plan;
          if
          :: graphs[g].makes ->
             if
             :: make(b, number);
                if
                :: graphs[g].combines -> combine(b, number, true)
                :: else
                fi
             :: give_up(b, number)  // its combine is not made, either
             fi
          :: else -> combine(b, number, false)
          fi
       // A call for more tokens.
       :: current < EXCHANGES - 1 -> current++; free_outgrown()
       fi;
       b = 0; number = 0; block = 0; i = 0; h = 0; g = 0; is_kept = false
     }
  od
}
