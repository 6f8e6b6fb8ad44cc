//! The method `TestIamPermissions` of `google.iam.v1.IAMPolicy`.
//!
//! There is no access control here. Every caller has every permission on a topic that exists. The
//! only exception is the permission to publish while a fault answers all publishes to the topic
//! with PERMISSION_DENIED. As in the service, a resource that does not exist has no permissions,
//! and this is no error.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::registry::Registry;
use crate::services::i_a_m_policy_server::IAMPolicy;
use crate::wire::{TestIamPermissionsRequest, TestIamPermissionsResponse};

const PUBLISH: &str = "pubsub.topics.publish";

/// Answers questions about permissions.
#[derive(Debug)]
pub(crate) struct IamPolicyService {
    pub(crate) registry: Arc<Registry>,
}

#[tonic::async_trait]
impl IAMPolicy for IamPolicyService {
    async fn test_iam_permissions(
        &self,
        request: Request<TestIamPermissionsRequest>,
    ) -> Result<Response<TestIamPermissionsResponse>, Status> {
        let TestIamPermissionsRequest {
            resource,
            mut permissions,
        } = request.into_inner();
        if self.registry.topic(&resource).is_err() {
            permissions.clear();
        }
        if self.registry.faults.denies_publishing(&resource) {
            permissions.retain(|permission| permission != PUBLISH);
        }
        Ok(Response::new(TestIamPermissionsResponse { permissions }))
    }
}
