"""Where groups run: processes of one fleet, AWS Auto Scaling groups, Kubernetes Deployments."""
