//! The outside of the aggregated API server, as a real API server and kubectl meet it, and as somebody does who goes past
//! the API server. The APIService is one per cluster, so each test has it for itself.

mod front_proxy;
mod kubectl;
mod outage;
