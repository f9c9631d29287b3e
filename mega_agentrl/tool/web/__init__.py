"""HTTP requests to public servers: rate limit, retries, deadline and the shared disk cache."""
