//! The authority's life as a state machine. What is to be done follows from the time and from what the Secret
//! holds, and from nothing else: so replicas that read the same do the same, and whoever writes first is followed.
//!
//! ```text
//! nothing ─Create→ signing ─Announce→ signing + next ─Confirm→ signing + next, published ─Switch→
//!                     ↑                                                signing (was next) + previous
//!                     └──────────────────────────────Retire──────────────────────────────┘
//! ```
//!
//! **Invariant.** What a replica serves is signed by an authority that is in every bundle that clients could find in the
//! last overlap. It holds where a replica hears of a change within half an overlap, and has published what follows
//! within another half:
//! - `next` signs only when it has been published for two overlaps: in the first of them a replica that had not heard of
//!   it may have put the bundle before in its place again, and in the second every client has found it;
//! - `previous` stays for an overlap after it has signed last, and by half of that everybody has heard of it.

use std::time::{Duration, SystemTime};

/// An authority: certificate and private key in PEM. The key is in no Debug.
#[derive(Clone, PartialEq, Eq)]
pub struct Ca {
    pub cert: String,
    pub key: String,
    pub not_after: SystemTime,
}

impl std::fmt::Debug for Ca {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ca").field("not_after", &self.not_after).finish_non_exhaustive()
    }
}

/// What the Secret holds when all is well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    pub signing: Ca,
    pub next: Option<Next>,
    pub previous: Option<Previous>,
}

/// The authority that will sign, and since when all clients can know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Next {
    pub ca: Ca,
    pub published: Option<SystemTime>,
}

/// The certificate of the authority that signed before, and how long it stays in the bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Previous {
    pub cert: String,
    pub until: SystemTime,
}

/// What was found in place of the Secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// No Secret, or one without data, as one is made beforehand so that nobody needs the right to
    /// create Secrets.
    Nothing,
    /// Ours, but not to be used; why.
    Corrupt(String),
    /// Somebody else's; why.
    Foreign(String),
    Held(State),
}

/// What is to be done with the Secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Keep it as it is.
    Keep,
    /// Begin with a new authority.
    Create,
    /// Put a next authority beside the one that signs.
    Announce,
    /// Note that the next one is published.
    Confirm,
    /// The next one signs from now on.
    Switch,
    /// Take the previous one out of the bundle.
    Retire,
    /// Leave another's Secret alone.
    Refuse,
}

/// How long things last. All follows from the validity of an authority.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    pub validity: Duration,
}

impl Timing {
    /// How old a bundle may be that a client still uses.
    pub fn overlap(self) -> Duration {
        self.validity / 10
    }

    /// Within this time every replica has to have heard of a change.
    pub fn stale(self) -> Duration {
        self.overlap() / 2
    }

    /// For so long the next authority is published before it signs.
    fn known_before_signing(self) -> Duration {
        self.overlap() + self.stale() * 2
    }

    /// An authority with less than this to live gets a successor. Announcing, confirming and publishing may take half an
    /// overlap each, and as long again where writes meet; then it is published for two, and there is room for what follows.
    fn announce_before_end(self) -> Duration {
        self.overlap() * 6
    }

    /// With less than this to live it is replaced whatever clients know: an expired one helps nobody. One replica has to
    /// write it, perhaps twice, and the others have to hear of it.
    fn switch_before_end(self) -> Duration {
        self.stale() * 3
    }
}

/// What is to be done now. `is_published` says whether what clients find has the next authority in it.
pub fn step(now: SystemTime, found: &Found, timing: Timing, is_published: bool) -> Action {
    let state = match found {
        Found::Nothing | Found::Corrupt(_) => return Action::Create,
        Found::Foreign(_) => return Action::Refuse,
        Found::Held(state) => state,
    };
    let ends_within = |time: Duration| state.signing.not_after <= now + time;
    match (&state.next, &state.previous) {
        (_, Some(previous)) if previous.until <= now => Action::Retire,
        (None, _) if ends_within(timing.announce_before_end()) => Action::Announce,
        (Some(_), _) if ends_within(timing.switch_before_end()) => Action::Switch,
        (Some(Next { published: None, .. }), _) if is_published => Action::Confirm,
        (Some(Next { published: Some(since), .. }), None)
            if *since + timing.known_before_signing() <= now =>
        {
            Action::Switch
        }
        _ => Action::Keep,
    }
}

/// What the Secret is to hold then; nothing where nothing is to be written. `make` makes a new authority.
///
/// # Errors
/// Those of `make`.
pub fn apply(
    action: Action,
    now: SystemTime,
    found: &Found,
    timing: Timing,
    make: impl FnOnce() -> anyhow::Result<Ca>,
) -> anyhow::Result<Option<State>> {
    if action == Action::Create {
        return Ok(Some(State { signing: make()?, next: None, previous: None }));
    }
    let Found::Held(state) = found else { return Ok(None) };
    let mut state = state.clone();
    match action {
        Action::Keep | Action::Create | Action::Refuse => return Ok(None),
        Action::Announce => state.next = Some(Next { ca: make()?, published: None }),
        Action::Confirm => {
            state.next = state.next.map(|next| Next { published: Some(now), ..next });
        }
        Action::Switch => {
            let Some(Next { ca, .. }) = state.next.take() else { return Ok(None) };
            let until = state.signing.not_after.min(now + timing.overlap());
            state.previous = Some(Previous { cert: state.signing.cert, until });
            state.signing = ca;
        }
        Action::Retire => state.previous = None,
    }
    Ok(Some(state))
}

impl State {
    /// The certificates that clients are to trust, in PEM.
    pub fn bundle(&self) -> String {
        let next = self.next.iter().map(|next| &next.ca.cert);
        let previous = self.previous.iter().map(|previous| &previous.cert);
        let all = std::iter::once(&self.signing.cert).chain(next).chain(previous);
        all.map(|cert| format!("{}\n", cert.trim_end())).collect()
    }
}

#[cfg(test)]
mod tests;
