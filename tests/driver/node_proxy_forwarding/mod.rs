//! What the node proxy passes on, seen from both of its ends: HTTP/2 by hand before it and behind it, so that nothing is added or
//! left out by a library. Its API server is away all along: for calls of pods that never opted in nobody asks it.

mod bounds;
mod calls;
mod ends;
mod rig;
