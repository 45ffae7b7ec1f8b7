// Shows openapi.json with Swagger UI, which docs.html loads before this.

const answer = await fetch("openapi.json");
// Below whatever path a proxy serves this page.
const url = new URL(".", document.baseURI).href.replace(/\/$/, "");
// Examples name the server by a variable.
const spec = JSON.parse((await answer.text()).replaceAll("$URL", () => url));
spec.servers = [{ url }];
window.SwaggerUIBundle({
  spec,
  dom_id: "#docs",
  deepLinking: true,
  // By default it sends the description to somebody else's server.
  validatorUrl: null,
  // Of the command that is shown beside a response: without it, curl ends with 0 after an error, too.
  requestInterceptor: (request) => Object.assign(request, { curlOptions: ["--fail-with-body"] }),
});
