//! The PoolAdmin service: status and growth of the pool of a running driver.

use tonic::{Request, Response, Status};

use super::Plugin;
use crate::status::Answer;
use admin::pool_admin_server::PoolAdmin;
use grpc::proto::admin::v1 as admin;
use storage::{Error, PoolStatus};

#[tonic::async_trait]
impl PoolAdmin for Plugin {
    async fn get_pool(
        &self,
        request: Request<admin::GetPoolRequest>,
    ) -> Result<Response<admin::GetPoolResponse>, Status> {
        self.call("GetPool", request, get_pool).await
    }

    async fn grow_pool(
        &self,
        request: Request<admin::GrowPoolRequest>,
    ) -> Result<Response<admin::GrowPoolResponse>, Status> {
        self.call("GrowPool", request, grow_pool).await
    }
}

fn get_pool(plugin: &Plugin, _: admin::GetPoolRequest) -> Answer<admin::GetPoolResponse> {
    Ok(admin::GetPoolResponse { pool: Some(pool(plugin.backend.pool_status()?)) })
}

fn grow_pool(plugin: &Plugin, request: admin::GrowPoolRequest) -> Answer<admin::GrowPoolResponse> {
    let admin::GrowPoolRequest { size_bytes } = request;
    // File sizes are int64.
    if size_bytes == 0 || i64::try_from(size_bytes).is_err() {
        let reason = format!("{size_bytes} is not a valid size in bytes");
        return Err(Error::invalid("size_bytes", reason).into());
    }
    Ok(admin::GrowPoolResponse { pool: Some(pool(plugin.backend.grow_pool(size_bytes)?)) })
}

fn pool(status: PoolStatus) -> admin::Pool {
    let PoolStatus { kind, reason, room, block_size, image, capacity, overcommit, condition } =
        status;
    admin::Pool {
        kind: kind.to_string(),
        reason,
        total_bytes: room.total,
        available_bytes: room.available,
        block_size_bytes: block_size,
        image: image.map(|image| admin::Image {
            size_bytes: image.size,
            allocated: image.allocated,
            shared_bytes: image.shared,
            available_below_bytes: image.available_below,
        }),
        provisioned_bytes: capacity.provisioned,
        overcommit,
        maximum_volume_bytes: capacity.maximum_volume,
        abnormal: condition.is_abnormal(),
        message: condition.message,
    }
}
