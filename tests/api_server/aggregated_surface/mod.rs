//! The interface of the aggregated API server to a real API server, to kubectl, and to clients that
//! bypass the API server. A cluster has one APIService, so each test uses it exclusively.

mod front_proxy;
mod kubectl;
mod outage;
