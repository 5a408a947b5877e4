//! gRPC server reflection, so that grpcurl and similar tools need no .proto files.

use tonic::transport::server::Router;
use tonic_reflection::server::Builder;
use tonic_reflection::server::v1::{ServerReflection, ServerReflectionServer};

use crate::proto::FILE_DESCRIPTOR_SET;

/// Adds the reflection services v1 and v1alpha, which list only `services`, the full names of the
/// services that the router serves.
///
/// # Errors
/// The descriptors of this build cannot be read.
pub fn add(router: Router, services: &[&str]) -> anyhow::Result<Router> {
    Ok(router.add_service(service(services)?).add_service(builder(services)?.build_v1alpha()?))
}

/// The service v1 alone, for a router of another kind.
///
/// # Errors
/// As [`add`].
pub fn service(
    services: &[&str],
) -> anyhow::Result<ServerReflectionServer<impl ServerReflection + use<>>> {
    Ok(builder(services)?.build_v1()?)
}

fn builder<'b>(services: &[&str]) -> anyhow::Result<Builder<'b>> {
    let builder = Builder::configure().register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET);
    Ok(services.iter().fold(builder, |builder, name| builder.with_service_name(*name)))
}
