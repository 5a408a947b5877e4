use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const TIMING: Timing = Timing { validity: Duration::from_secs(1000) };
const START: SystemTime = SystemTime::UNIX_EPOCH;

fn at(seconds: u64) -> SystemTime {
    START + Duration::from_secs(seconds)
}

fn ca(name: &str, not_after: SystemTime) -> Ca {
    Ca { cert: format!("<{name}>"), key: String::new(), not_after }
}

fn held(next: Option<Option<u64>>, previous: Option<u64>) -> Found {
    let next = next.map(|published| Next { ca: ca("2", at(1600)), published: published.map(at) });
    let previous = previous.map(|until| Previous { cert: "<0>".into(), until: at(until) });
    Found::Held(State { signing: ca("1", at(1000)), next, previous })
}

#[test]
fn each_transition_has_its_time() {
    // Validity 1000 s: overlap 100 s, stale 50 s.
    let cases = [
        ("nothing is there", 0, Found::Nothing, false, Action::Create),
        ("it is damaged", 0, Found::Corrupt(String::new()), false, Action::Create),
        ("it is another's", 0, Found::Foreign(String::new()), false, Action::Refuse),
        ("young", 399, held(None, None), false, Action::Keep),
        ("six overlaps are left", 400, held(None, None), false, Action::Announce),
        ("the next one is not out", 849, held(Some(None), None), false, Action::Keep),
        ("the next one is out", 610, held(Some(None), None), true, Action::Confirm),
        ("out, too short", 809, held(Some(Some(610)), None), true, Action::Keep),
        ("out for long enough", 810, held(Some(Some(610)), None), true, Action::Switch),
        (
            "a previous one is still there",
            760,
            held(Some(Some(610)), Some(800)),
            true,
            Action::Keep,
        ),
        ("the end is near", 850, held(Some(None), None), false, Action::Switch),
        ("it has ended", 2000, held(None, None), false, Action::Announce),
        ("the previous one stays", 399, held(None, Some(400)), false, Action::Keep),
        ("the previous one has had its time", 400, held(None, Some(400)), false, Action::Retire),
    ];
    for (when, seconds, found, published, action) in cases {
        assert_eq!(step(at(seconds), &found, TIMING, published), action, "{when}");
    }
}

fn done(action: Action, seconds: u64, found: &Found) -> Option<State> {
    let make = || Ok(ca("new", at(seconds) + TIMING.validity));
    apply(action, at(seconds), found, TIMING, make).unwrap()
}

#[test]
fn each_action_changes_what_it_should_and_no_more() {
    let young = held(None, None);
    let Found::Held(before) = young.clone() else { unreachable!() };
    for action in [Action::Keep, Action::Refuse, Action::Switch] {
        assert_eq!(done(action, 0, &young), None, "{action:?}");
    }
    let made = done(Action::Create, 5, &Found::Nothing).unwrap();
    assert_eq!((made.bundle().as_str(), made.signing.not_after), ("<new>\n", at(1005)));
    let announced = done(Action::Announce, 600, &young).unwrap();
    assert_eq!(announced.bundle(), "<1>\n<new>\n");
    assert_eq!((&announced.signing, &announced.previous), (&before.signing, &None));
    let confirmed = done(Action::Confirm, 610, &Found::Held(announced)).unwrap();
    assert_eq!(confirmed.next.as_ref().unwrap().published, Some(at(610)));
    let switched = done(Action::Switch, 760, &Found::Held(confirmed)).unwrap();
    assert_eq!((switched.signing.cert.as_str(), &switched.next), ("<new>", &None));
    assert_eq!(switched.previous, Some(Previous { cert: "<1>".into(), until: at(860) }));
    assert_eq!(switched.bundle(), "<new>\n<1>\n");
    let retired = done(Action::Retire, 860, &Found::Held(switched)).unwrap();
    assert_eq!(retired.bundle(), "<new>\n");
}

#[test]
fn an_authority_that_ended_while_nobody_looked_is_replaced_at_once() {
    let mut found = held(None, None);
    for expected in [Action::Announce, Action::Switch, Action::Retire, Action::Keep] {
        let action = step(at(5000), &found, TIMING, false);
        assert_eq!(action, expected);
        if let Some(state) = done(action, 5000, &found) {
            found = Found::Held(state);
        }
    }
}

/// A replica as the Secret's reader and writer, and as one that serves and publishes.
#[derive(Debug, Clone, Default)]
struct Replica {
    /// What it has read last, the Secret's version then, and when.
    read: Option<(State, u64)>,
    heard: Duration,
    /// When it has published and looked last.
    told: Duration,
    /// The publisher's view of the object.
    sees: String,
}

/// What may happen, at a replica.
#[derive(Debug, Clone, Copy)]
enum Event {
    /// It reads the Secret.
    Read,
    /// It does what is due after what it has read.
    Write,
    /// It writes its bundle into the object that clients find, unless it has not heard of the Secret for long.
    Publish,
    /// It looks at that object.
    Look,
}

struct World {
    now: Duration,
    secret: Option<(State, u64)>,
    replicas: [Replica; 2],
    /// Bundles that clients could find, each from that time on.
    published: VecDeque<(Duration, String)>,
    made: u64,
    switches: u64,
}

impl World {
    fn new() -> Self {
        Self {
            now: Duration::ZERO,
            secret: None,
            replicas: [Replica::default(), Replica::default()],
            published: VecDeque::new(),
            made: 0,
            switches: 0,
        }
    }

    fn happens(&mut self, event: Event, at: usize) {
        match event {
            Event::Read => {
                self.replicas[at].read.clone_from(&self.secret);
                self.replicas[at].heard = self.now;
            }
            Event::Write => self.write(at),
            Event::Publish => self.publish(at),
            Event::Look => {
                let found = self.published.back().map(|(_, bundle)| bundle.clone());
                self.replicas[at].sees = found.unwrap_or_default();
            }
        }
    }

    fn write(&mut self, at: usize) {
        let replica = self.replicas[at].clone();
        let (found, version) = match replica.read {
            Some((state, version)) => (Found::Held(state), version),
            None => (Found::Nothing, 0),
        };
        let is_published = matches!(&found, Found::Held(State { next: Some(next), .. })
            if replica.sees.contains(&next.ca.cert));
        let now = START + self.now;
        let action = step(now, &found, TIMING, is_published);
        let name = (self.made + 1).to_string();
        let make = || Ok(ca(&name, now + TIMING.validity));
        let Some(state) = apply(action, now, &found, TIMING, make).unwrap() else { return };
        // The API server's part: what has changed since is not overwritten.
        if self.secret.as_ref().map_or(0, |(_, version)| *version) != version {
            return;
        }
        self.made += 1;
        self.switches += u64::from(action == Action::Switch);
        self.secret = Some((state, version + 1));
    }

    /// Nobody is cut off for longer than is promised, neither from the Secret nor from what is published.
    fn second_passes(&mut self) -> Result<(), TestCaseError> {
        self.now += Duration::from_secs(1);
        for at in 0..2 {
            let most = TIMING.stale() - Duration::from_secs(1);
            if self.now - self.replicas[at].heard >= most {
                self.happens(Event::Read, at);
            }
            if self.now - self.replicas[at].told >= most {
                for event in [Event::Publish, Event::Look, Event::Write] {
                    self.happens(event, at);
                }
            }
        }
        self.check()
    }

    fn publish(&mut self, at: usize) {
        let replica = &mut self.replicas[at];
        replica.told = self.now;
        let fresh = self.now - replica.heard < TIMING.stale();
        let Some((state, _)) = replica.read.as_ref().filter(|_| fresh) else { return };
        self.published.push_back((self.now, state.bundle()));
    }

    /// What every replica serves has to be trusted by whoever has fetched a bundle within the last overlap.
    fn check(&mut self) -> Result<(), TestCaseError> {
        let since = self.now.saturating_sub(TIMING.overlap());
        while self.published.get(1).is_some_and(|(from, _)| *from <= since) {
            self.published.pop_front();
        }
        for replica in &self.replicas {
            let Some((state, _)) = &replica.read else { continue };
            for (from, bundle) in &self.published {
                prop_assert!(
                    bundle.contains(&state.signing.cert),
                    "at {:?}: serves {}, clients since {from:?} trust {bundle:?}",
                    self.now,
                    state.signing.cert,
                );
            }
            prop_assert!(state.signing.not_after > START + self.now, "serves an expired one");
        }
        Ok(())
    }
}

fn event() -> impl Strategy<Value = (Event, usize, u64)> {
    let event = prop_oneof![
        Just(Event::Read),
        Just(Event::Write),
        Just(Event::Write),
        Just(Event::Publish),
        Just(Event::Look)
    ];
    // In thousandths of the validity: a stale time is 50.
    (event, 0..2_usize, prop_oneof![4 => 0..3_u64, 1 => 0..40_u64])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever two replicas do in whatever order, as long as each hears of the Secret within half an overlap.
    #[test]
    fn what_is_served_is_in_every_bundle_of_the_last_overlap(
        events in prop::collection::vec(event(), 600),
    ) {
        let mut world = World::new();
        for (event, at, pause) in events {
            for _ in 0..pause {
                world.second_passes()?;
            }
            world.happens(event, at);
            world.check()?;
        }
        prop_assert!(world.switches > 0 || world.now < TIMING.validity, "nothing was ever rotated");
    }
}
