//! The commands of mover pods and the objects that they create, in trouble: meshes, refusals of the
//! cluster, repeated requests, interruptions. The tests act as controllers and kubelet; there is no
//! driver.

mod creations;
mod faulty;
mod grants;
mod progress;
mod rebinding;
mod refusals;
mod rig;
mod stuck;
mod temporary;
