//! What was seen of an endpoint, as conditions of its DriverDiscovery.

use std::time::{Duration, SystemTime};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

use crate::aggregated_api::endpoint::Trouble;
use crate::aggregated_api::endpoint::certificate::Certificate;
use crate::grpc::{MAX_MESSAGE, cut};
use crate::kubernetes::cbt_http::{Capability, Info};

pub const REACHABLE: &str = "EndpointReachable";
pub const CAPABLE: &str = "CapabilityPresent";
pub const CERTIFICATE: &str = "CertificateValid";

/// A certificate that ends sooner is to be renewed now.
const SOON: Duration = Duration::from_secs(24 * 3600);

/// What was seen.
pub enum Seen {
    /// The object says nothing that could be called; why.
    Unusable(String),
    Called {
        info: Result<Info, Trouble>,
        certificate: Certificate,
    },
}

impl Seen {
    /// Whether there is nothing more to learn before something changes.
    pub fn is_answer(&self) -> bool {
        !matches!(self, Self::Called { info: Err(_), .. })
    }
}

/// Status, reason and message of a condition.
struct Told(&'static str, &'static str, String);

const TRUE: &str = "True";
const FALSE: &str = "False";
const UNKNOWN: &str = "Unknown";

/// The conditions of the driver's object of that generation, where `before` are those that it had.
pub fn conditions(
    driver: &str,
    generation: Option<i64>,
    seen: &Seen,
    before: &[Condition],
    now: Timestamp,
) -> Vec<Condition> {
    let told = match seen {
        Seen::Unusable(why) => [REACHABLE, CAPABLE, CERTIFICATE].map(|kind| {
            let status = if kind == REACHABLE { FALSE } else { UNKNOWN };
            (kind, Told(status, "DiscoveryUnusable", why.clone()))
        }),
        Seen::Called { info, certificate } => [
            (REACHABLE, reachable(info)),
            (CAPABLE, capable(driver, info)),
            (CERTIFICATE, valid(certificate, now)),
        ],
    };
    let made = told.map(|(kind, Told(status, reason, message))| {
        let same = before.iter().find(|one| one.type_ == kind && one.status == status);
        Condition {
            type_: kind.into(),
            status: status.into(),
            reason: reason.into(),
            message: cut(&message.replace(char::is_control, " "), MAX_MESSAGE),
            observed_generation: generation,
            last_transition_time: same.map_or(Time(now), |one| one.last_transition_time.clone()),
        }
    });
    made.into()
}

fn reachable(info: &Result<Info, Trouble>) -> Told {
    match info {
        Ok(_) => Told(TRUE, "Reached", "the endpoint answers".into()),
        Err(Trouble::Unreachable(why)) => Told(FALSE, "Unreachable", why.clone()),
        Err(Trouble::Untrue(why)) => Told(FALSE, "NotUnderstood", why.clone()),
        Err(Trouble::Told { problem, .. }) => {
            Told(FALSE, "Refused", format!("{:?}: {}", problem.kind, problem.message))
        }
        Err(Trouble::Busy) => Told(UNKNOWN, "Busy", "too many calls run already".into()),
        Err(Trouble::NoToken(why)) => Told(UNKNOWN, "NoToken", why.message.clone()),
    }
}

fn capable(driver: &str, info: &Result<Info, Trouble>) -> Told {
    let Ok(info) = info else {
        return Told(UNKNOWN, "NotReached", "the endpoint could not be asked".into());
    };
    if info.driver != driver {
        let message = format!("the endpoint is that of the CSI driver {}", info.driver);
        return Told(FALSE, "OtherDriver", message);
    }
    let present = |reason| Told(TRUE, reason, format!("the driver has {reason}"));
    match info.capability {
        Capability::ListSnapshotDeltas => present("ListSnapshotDeltas"),
        Capability::SnapshotMetadata => present("SnapshotMetadata"),
        Capability::None => {
            Told(FALSE, "NoCapability", "the driver has no call that tells changed blocks".into())
        }
    }
}

fn valid(certificate: &Certificate, now: Timestamp) -> Told {
    match certificate {
        Certificate::Good { until } => {
            let soon = SystemTime::from(now) + SOON;
            let end = Timestamp::try_from(*until).map_or("?".into(), |end| end.to_string());
            if *until < soon {
                let message = format!("the certificate ends at {end}; renew it");
                return Told(FALSE, "CertificateExpiring", message);
            }
            Told(TRUE, "CertificateValid", format!("the certificate is good until {end}"))
        }
        Certificate::Bad { reason, message } => Told(FALSE, reason, message.clone()),
        Certificate::Unseen(why) => Told(UNKNOWN, "NotReached", why.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubernetes::cbt_http::{Problem, ProblemKind};

    fn now() -> Timestamp {
        Timestamp::from_second(1_700_000_000).unwrap()
    }

    fn until(hours: u64) -> Certificate {
        Certificate::Good { until: SystemTime::from(now()) + Duration::from_secs(hours * 3600) }
    }

    /// Status and reason of each.
    fn told(seen: &Seen) -> Vec<(String, String)> {
        let made = conditions("d", Some(1), seen, &[], now());
        made.into_iter().map(|one| (one.status, one.reason)).collect()
    }

    fn called(info: Result<Info, Trouble>, certificate: Certificate) -> Vec<(String, String)> {
        told(&Seen::Called { info, certificate })
    }

    fn info(driver: &str, capability: Capability) -> Result<Info, Trouble> {
        Ok(Info { driver: driver.into(), capability })
    }

    fn is(told: &(String, String), status: &str, reason: &str) -> bool {
        told.0 == status && told.1 == reason
    }

    #[test]
    fn each_thing_that_can_be_seen_is_told() {
        let made = called(info("d", Capability::ListSnapshotDeltas), until(25));
        assert!(is(&made[0], "True", "Reached") && is(&made[1], "True", "ListSnapshotDeltas"));
        assert!(is(&made[2], "True", "CertificateValid"));
        let made = called(info("d", Capability::SnapshotMetadata), until(23));
        assert!(is(&made[1], "True", "SnapshotMetadata"));
        assert!(is(&made[2], "False", "CertificateExpiring"));
        let made = called(info("d", Capability::None), until(25));
        assert!(is(&made[1], "False", "NoCapability"));
        let made = called(info("other", Capability::ListSnapshotDeltas), until(25));
        assert!(is(&made[1], "False", "OtherDriver"));
        let gone = Trouble::Unreachable("x".into());
        let made = called(Err(gone), Certificate::Unseen("x".into()));
        assert!(is(&made[0], "False", "Unreachable"));
        assert!(made[1..].iter().all(|one| is(one, "Unknown", "NotReached")));
        let (kind, message) = (ProblemKind::NotAllowed, "x".into());
        let refused = Trouble::Told { problem: Problem { kind, message, code: None }, after: None };
        let bad = Certificate::Bad { reason: "CertificateExpired", message: "x".into() };
        let made = called(Err(refused), bad);
        assert!(is(&made[0], "False", "Refused") && is(&made[2], "False", "CertificateExpired"));
        let made = told(&Seen::Unusable("x".into()));
        assert!(is(&made[0], "False", "DiscoveryUnusable"));
        assert!(made[1..].iter().all(|one| is(one, "Unknown", "DiscoveryUnusable")));
    }

    #[test]
    fn the_time_of_a_condition_is_that_of_its_last_change_of_status() {
        let seen =
            |capability| Seen::Called { info: info("d", capability), certificate: until(25) };
        let first = conditions("d", Some(1), &seen(Capability::ListSnapshotDeltas), &[], now());
        let later = Timestamp::from_second(1_700_000_060).unwrap();
        let same = conditions("d", Some(2), &seen(Capability::SnapshotMetadata), &first, later);
        assert!(same.iter().all(|one| one.last_transition_time.0 == now()));
        assert!(same.iter().all(|one| one.observed_generation == Some(2)));
        let other = conditions("d", Some(2), &seen(Capability::None), &same, later);
        assert_eq!(other[0].last_transition_time.0, now());
        assert_eq!(other[1].last_transition_time.0, later);
    }
}
