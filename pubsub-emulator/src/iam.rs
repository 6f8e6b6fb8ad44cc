//! The method `TestIamPermissions` of `google.iam.v1.IAMPolicy`.
//!
//! The emulator has no access control: every caller has every permission on a topic that exists. The only
//! exception is the permission to publish, which callers lack while a fault answers all publishes to the
//! topic with PERMISSION_DENIED. While a fault refuses all publishes to the topic with a reason
//! (`FailWithReason`), this method fails with the error of that fault. As in the service, the answer for a
//! resource that does not exist is an empty list of permissions, not an error.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::registry::Registry;
use crate::services::i_a_m_policy_server::IAMPolicy;
use crate::wire::{TestIamPermissionsRequest, TestIamPermissionsResponse};

const PUBLISH: &str = "pubsub.topics.publish";

/// The gRPC service that answers questions about permissions.
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
        if let Some(refusal) = self.registry.faults.refusal(&resource) {
            return Err(refusal);
        }
        if self.registry.topic(&resource).is_err() {
            permissions.clear();
        }
        if self.registry.faults.denies_publishing(&resource) {
            permissions.retain(|permission| permission != PUBLISH);
        }
        Ok(Response::new(TestIamPermissionsResponse { permissions }))
    }
}
