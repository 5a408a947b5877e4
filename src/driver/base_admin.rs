//! The BaseAdmin service: the snapshots that can be bases of a delta, and their retention.

use prost_types::Timestamp;
use tonic::{Request, Response, Status};

use super::request::{page, token};
use super::{Plugin, request, response};
use crate::status::Answer;
use admin::base_admin_server::BaseAdmin;
use admin::set_base_retention_request::Retention as RequestedRetention;
use grpc::proto::admin::v1 as admin;
use storage::{Base, BaseFilter, Error, Result, SnapshotPhase, now};

/// Maximum retention of a base: 100 years, so that every client can represent the times.
const MAX_SECONDS: u64 = 100 * 365 * 86_400;

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

fn list(plugin: &Plugin, req: admin::ListBasesRequest) -> Answer<admin::ListBasesResponse> {
    let volume_id = request::optional_id("volume_id", &req.volume_id)?;
    let target = request::optional_id("target_snapshot_id", &req.target_snapshot_id)?;
    let of = match (volume_id, target) {
        ("", "") => {
            return Err(Error::invalid(
                "volume_id",
                "is required, unless target_snapshot_id is set",
            )
            .into());
        }
        (volume_id, "") => BaseFilter::Volume(volume_id.to_owned()),
        ("", target) => BaseFilter::Target(target.to_owned()),
        _ => {
            return Err(
                Error::invalid("target_snapshot_id", "cannot be combined with volume_id").into()
            );
        }
    };
    let max = page(request::max_entries(req.max_entries)?);
    let page = plugin.backend.bases(&of, token(&req.starting_token), max)?;
    let sized = |item: Base| -> Result<admin::Base> {
        let sizes =
            if req.include_sizes { plugin.backend.record_sizes(&item.snapshot)? } else { None };
        Ok(admin::Base {
            allocated_bytes: sizes.map(|sizes| sizes.allocated),
            changed_bytes: sizes.and_then(|sizes| sizes.changed),
            ..base(item)
        })
    };
    Ok(admin::ListBasesResponse {
        bases: page.items.into_iter().map(sized).collect::<Result<_>>()?,
        next_token: page.next.unwrap_or_default(),
    })
}

fn set_retention(
    plugin: &Plugin,
    req: admin::SetBaseRetentionRequest,
) -> Answer<admin::SetBaseRetentionResponse> {
    let id = request::id("snapshot_id", &req.snapshot_id)?;
    let retention = retention(req.retention.as_ref(), now().0)?;
    let kept = plugin.backend.retain_base(id, retention)?;
    Ok(admin::SetBaseRetentionResponse { base: Some(base(kept)) })
}

/// The requested retention; `None` means the driver's default. `now` is in seconds since the epoch.
fn retention(req: Option<&RequestedRetention>, now: u64) -> Result<Option<storage::Retention>> {
    match req {
        None => {
            Err(Error::invalid("retention", "is required: set for_seconds, until or by_default"))
        }
        Some(RequestedRetention::ByDefault(true)) => Ok(None),
        Some(RequestedRetention::ByDefault(false)) => {
            Err(Error::invalid("by_default", "must be true"))
        }
        Some(RequestedRetention::ForSeconds(seconds)) if *seconds > MAX_SECONDS => {
            let reason = format!("is more than {MAX_SECONDS} (100 years)");
            Err(Error::invalid("for_seconds", reason))
        }
        Some(RequestedRetention::ForSeconds(seconds)) => {
            Ok(Some(storage::Retention::For(*seconds)))
        }
        Some(RequestedRetention::Until(time)) => until(time, now).map(Some),
    }
}

fn until(time: &Timestamp, now: u64) -> Result<storage::Retention> {
    let is_time = (0..1_000_000_000).contains(&time.nanos);
    let seconds = u64::try_from(time.seconds).ok().filter(|_| is_time);
    match seconds {
        None => Err(Error::invalid("until", "is not a time after 1970")),
        Some(seconds) if seconds <= now => {
            Err(Error::invalid("until", "is not in the future; for_seconds 0 releases a base"))
        }
        Some(seconds) if seconds - now > MAX_SECONDS => {
            Err(Error::invalid("until", "is more than 100 years away"))
        }
        Some(seconds) => Ok(storage::Retention::Until(seconds)),
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
            storage::Retention::For(seconds) => Retention::ForSeconds(seconds),
            storage::Retention::Until(time) => Retention::Until(at(time)),
        }),
        snapshot_id: snapshot.id,
        volume_id: snapshot.volume_id,
        allocated_bytes: None,
        changed_bytes: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retention_outside_100_years_is_refused() {
        let at = |seconds, nanos| RequestedRetention::Until(Timestamp { seconds, nanos });
        let good = |req: &RequestedRetention| retention(Some(req), 1000).unwrap();
        assert_eq!(good(&RequestedRetention::ByDefault(true)), None);
        for seconds in [0, 1, MAX_SECONDS] {
            let kept = Some(storage::Retention::For(seconds));
            assert_eq!(good(&RequestedRetention::ForSeconds(seconds)), kept);
        }
        assert_eq!(good(&at(1001, 999_999_999)), Some(storage::Retention::Until(1001)));
        let last = i64::try_from(1000 + MAX_SECONDS).unwrap();
        assert_eq!(good(&at(last, 0)), Some(storage::Retention::Until(last.unsigned_abs())));
        for (bad, field) in [
            (None, "retention"),
            (Some(RequestedRetention::ByDefault(false)), "by_default"),
            (Some(RequestedRetention::ForSeconds(MAX_SECONDS + 1)), "for_seconds"),
            (Some(RequestedRetention::ForSeconds(u64::MAX)), "for_seconds"),
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
