// Shows openapi.json with Swagger UI, which docs.html loads before this.

const answer = await fetch("openapi.json");
const spec = await answer.json();
// Below whatever path a proxy serves this page.
spec.servers = [{ url: new URL(".", document.baseURI).href.replace(/\/$/, "") }];
window.SwaggerUIBundle({
  spec,
  dom_id: "#docs",
  deepLinking: true,
  // By default it sends the description to somebody else's server.
  validatorUrl: null,
});
