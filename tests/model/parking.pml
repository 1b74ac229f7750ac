// SPDX-License-Identifier: Apache-2.0
// How a rank of the CPU executor sleeps until a signal of its moves, and how peers wake it
// (src/transport/mapped/signal_block.hpp, and Waiter::until in
// src/cpu/protocol/waiter.cpp).
//
// Checked: a rank whose signal was raised wakes up. There is no deadline here, so that a lost
// wake-up is a deadlock.
//
// Memory. What a thread stores is seen by the other one later, in any order; only an access that is
// seq_cst waits until all that the thread stored before is seen, itself included. (A release keeps
// what was before it before it: the doorbell is seen after the signal.) The kernel compares the
// doorbell once more before it lets a thread sleep, and sees what is seen by all. Two peers raise one
// signal each; the sleeper wants both.
//
// Mutations, each of which makes the check fail:
//   RELAXED_RING      ring() does not order its doorbell before its look at the waiters
//   RELAXED_SLEEP     sleep() does not order its count before its look at the doorbell
//   RING_FIRST        the doorbell is rung before the signal is raised
//   TEST_FIRST        the signals are tested before the doorbell is read
//   NO_KERNEL_LOOK    the thread sleeps without comparing the doorbell once more
//   WAKES_NOBODY      ring() does not wake the sleeper
#define PEERS 2

byte raised;    // signals
byte doorbell;  // as all see it
byte waiters;
bool is_asleep;

// A store that only its thread sees yet, and the access behind which everybody does.
#ifdef RELAXED_RING
#define RING_IS_SEEN true
#else
#define RING_IS_SEEN !has_rung[me]
#endif
#ifdef RELAXED_SLEEP
#define COUNT_IS_SEEN true
#else
#define COUNT_IS_SEEN !has_counted
#endif
bool has_rung[PEERS];  // a ringer, but nobody else sees it yet
bool has_counted;      // the sleeper, likewise

proctype seen() {
end:
  do
  :: d_step { has_rung[0] -> has_rung[0] = false; doorbell++ }
  :: d_step { has_rung[1] -> has_rung[1] = false; doorbell++ }
  :: d_step { has_counted -> has_counted = false; waiters++ }
  od
}

proctype ringer(bit me) {
#ifdef RING_FIRST
  has_rung[me] = true;
  RING_IS_SEEN;
  raised++;
#else
  raised++;
  has_rung[me] = true;
  RING_IS_SEEN;
#endif
#ifndef WAKES_NOBODY
  if
  :: waiters != 0 -> is_asleep = false
  :: waiters == 0
  fi
#endif
}

proctype sleeper() {
  byte bell;
  do
  ::
#ifdef TEST_FIRST
     if
     :: raised == PEERS -> break
     :: raised != PEERS
     fi;
     bell = doorbell;
#else
     bell = doorbell;
     if
     :: raised == PEERS -> break
     :: raised != PEERS
     fi;
#endif
     has_counted = true;
     COUNT_IS_SEEN;
     if
     :: doorbell == bell ->
        // The look and the sleep are one step of the kernel's, and so is waking.
#ifdef NO_KERNEL_LOOK
        is_asleep = true;
#else
        atomic {
          if
          :: doorbell == bell -> is_asleep = true
          :: else
          fi
        };
#endif
        !is_asleep
     :: doorbell != bell
     fi;
     d_step {
       if
       :: has_counted -> has_counted = false
       :: else -> waiters--
       fi
     };
     bell = 0
  od
}

init {
  atomic {
    run seen();
    run sleeper();
    run ringer(0);
    run ringer(1)
  }
}
