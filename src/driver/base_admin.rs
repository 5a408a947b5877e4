//! The BaseAdmin service: which snapshots can be the base of a delta, and for how long.

use prost_types::Timestamp;
use tonic::{Request, Response, Status};

use super::controller::{page, token};
use super::{Plugin, request, response};
use crate::backend::{self, Base, BasesOf, Error, Result, SnapshotPhase, now};
use crate::grpc::call::note;
use crate::proto::admin::v1 as admin;
use admin::base_admin_server::BaseAdmin;
use admin::set_base_retention_request::Retention as Asked;

use super::call::{Describe, Subject};

/// A base is kept for at most 100 years: times stay such that every client can write them down.
const LONGEST_SECONDS: u64 = 100 * 365 * 86_400;

#[tonic::async_trait]
impl BaseAdmin for Plugin {
    async fn list_bases(
        &self,
        request: Request<admin::ListBasesRequest>,
    ) -> Result<Response<admin::ListBasesResponse>, Status> {
        self.call("ListBases", request, list).await
    }

    async fn set_base_retention(
        &self,
        request: Request<admin::SetBaseRetentionRequest>,
    ) -> Result<Response<admin::SetBaseRetentionResponse>, Status> {
        self.call("SetBaseRetention", request, set_retention).await
    }
}

fn list(
    plugin: &Plugin,
    asked: admin::ListBasesRequest,
) -> Result<admin::ListBasesResponse, Status> {
    let volume_id = request::optional_id("volume_id", &asked.volume_id)?;
    let target = request::optional_id("target_snapshot_id", &asked.target_snapshot_id)?;
    let of = match (volume_id, target) {
        ("", "") => {
            return Err(
                Error::invalid("volume_id", "is required, or target_snapshot_id instead").into()
            );
        }
        (volume_id, "") => BasesOf::Volume(volume_id.to_owned()),
        ("", target) => BasesOf::Target(target.to_owned()),
        _ => {
            return Err(Error::invalid("target_snapshot_id", "excludes volume_id").into());
        }
    };
    let max = page(request::max_entries(asked.max_entries)?);
    let page = plugin.backend.bases(&of, token(&asked.starting_token), max)?;
    Ok(admin::ListBasesResponse {
        bases: page.items.into_iter().map(base).collect(),
        next_token: page.next.unwrap_or_default(),
    })
}

fn set_retention(
    plugin: &Plugin,
    asked: admin::SetBaseRetentionRequest,
) -> Result<admin::SetBaseRetentionResponse, Status> {
    let id = request::id("snapshot_id", &asked.snapshot_id)?;
    let retention = retention(asked.retention.as_ref(), now().0)?;
    let kept = plugin.backend.retain_base(id, retention)?;
    Ok(admin::SetBaseRetentionResponse { base: Some(base(kept)) })
}

/// What is asked for, `None` for the driver's own retention. `now` is in seconds since the epoch.
fn retention(asked: Option<&Asked>, now: u64) -> Result<Option<backend::Retention>> {
    match asked {
        None => Err(Error::invalid("retention", "is required: for_seconds, until or by_default")),
        Some(Asked::ByDefault(true)) => Ok(None),
        Some(Asked::ByDefault(false)) => Err(Error::invalid("by_default", "can only be true")),
        Some(Asked::ForSeconds(seconds)) if *seconds > LONGEST_SECONDS => {
            let reason = format!("is more than {LONGEST_SECONDS}, 100 years");
            Err(Error::invalid("for_seconds", reason))
        }
        Some(Asked::ForSeconds(seconds)) => Ok(Some(backend::Retention::For(*seconds))),
        Some(Asked::Until(time)) => until(time, now).map(Some),
    }
}

fn until(time: &Timestamp, now: u64) -> Result<backend::Retention> {
    let is_time = (0..1_000_000_000).contains(&time.nanos);
    let seconds = u64::try_from(time.seconds).ok().filter(|_| is_time);
    match seconds {
        None => Err(Error::invalid("until", "is not a time after 1970")),
        Some(seconds) if seconds <= now => {
            Err(Error::invalid("until", "is not in the future; for_seconds 0 releases a base"))
        }
        Some(seconds) if seconds - now > LONGEST_SECONDS => {
            Err(Error::invalid("until", "is more than 100 years away"))
        }
        Some(seconds) => Ok(backend::Retention::Until(seconds)),
    }
}

fn base(base: Base) -> admin::Base {
    use admin::base::Retention;
    let Base { snapshot, expires_at } = base;
    let at = |seconds| response::timestamp((seconds, 0));
    admin::Base {
        created_at: Some(response::timestamp(snapshot.created_at)),
        deleted_at: match snapshot.phase {
            SnapshotPhase::Deleted { at: time } => Some(at(time)),
            _ => None,
        },
        expires_at: expires_at.map(at),
        retention: snapshot.retention.map(|retention| match retention {
            backend::Retention::For(seconds) => Retention::ForSeconds(seconds),
            backend::Retention::Until(time) => Retention::Until(at(time)),
        }),
        snapshot_id: snapshot.id,
        volume_id: snapshot.volume_id,
    }
}

impl Describe for admin::ListBasesRequest {
    fn describe(&self, subject: &mut Subject) {
        subject.volume_id = note(&self.volume_id);
        subject.snapshot_id = note(&self.target_snapshot_id);
    }
}

impl Describe for admin::SetBaseRetentionRequest {
    fn describe(&self, subject: &mut Subject) {
        subject.snapshot_id = note(&self.snapshot_id);
    }
}

impl Describe for admin::ListBasesResponse {
    fn describe(&self, _: &mut Subject) {}
}

impl Describe for admin::SetBaseRetentionResponse {
    fn describe(&self, _: &mut Subject) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retention_is_within_a_hundred_years_or_refused_by_its_name() {
        let at = |seconds, nanos| Asked::Until(Timestamp { seconds, nanos });
        let good = |asked: &Asked| retention(Some(asked), 1000).unwrap();
        assert_eq!(good(&Asked::ByDefault(true)), None);
        for seconds in [0, 1, LONGEST_SECONDS] {
            let kept = Some(backend::Retention::For(seconds));
            assert_eq!(good(&Asked::ForSeconds(seconds)), kept);
        }
        assert_eq!(good(&at(1001, 999_999_999)), Some(backend::Retention::Until(1001)));
        let last = i64::try_from(1000 + LONGEST_SECONDS).unwrap();
        assert_eq!(good(&at(last, 0)), Some(backend::Retention::Until(last.unsigned_abs())));
        for (bad, field) in [
            (None, "retention"),
            (Some(Asked::ByDefault(false)), "by_default"),
            (Some(Asked::ForSeconds(LONGEST_SECONDS + 1)), "for_seconds"),
            (Some(Asked::ForSeconds(u64::MAX)), "for_seconds"),
            (Some(at(1000, 0)), "until"),
            (Some(at(-1, 0)), "until"),
            (Some(at(1001, -1)), "until"),
            (Some(at(1001, 1_000_000_000)), "until"),
            (Some(at(last + 1, 0)), "until"),
            (Some(at(i64::MAX, 0)), "until"),
        ] {
            let refused = retention(bad.as_ref(), 1000).unwrap_err();
            assert!(
                matches!(&refused, Error::Invalid { field: named, .. } if *named == field),
                "{refused}"
            );
        }
    }
}
