package penstock.msk

import java.net.{URI, URLDecoder, URLEncoder}
import java.nio.charset.StandardCharsets.UTF_8
import java.security.MessageDigest
import java.time.format.DateTimeFormatter
import java.time.{Instant, ZoneOffset}
import java.util.{Base64, HexFormat, List => Entries, Map => Settings, Set => Scopes}
import javax.crypto.Mac
import javax.crypto.spec.SecretKeySpec
import javax.security.auth.callback.Callback
import javax.security.auth.login.AppConfigurationEntry
import org.apache.kafka.common.security.auth.AuthenticateCallbackHandler
import org.apache.kafka.common.security.oauthbearer.{OAuthBearerToken, OAuthBearerValidatorCallback}

/** The broker's side of MSK's IAM login, as AWS describes it: a token is the URL of a request to connect, signed by the keys of an
  * AWS user (SigV4 in the query), in base64. This one knows one user.
  *
  * Options of the listener's JAAS entry: id, secret, region, and principal: who the user is in Kafka.
  */
class MskTokens extends AuthenticateCallbackHandler {
  private var options: Settings[String, _] = _

  override def configure(settings: Settings[String, _], mechanism: String, entries: Entries[AppConfigurationEntry]): Unit =
    options = entries.get(0).getOptions

  override def close(): Unit = ()

  override def handle(callbacks: Array[Callback]): Unit = callbacks.foreach {
    case callback: OAuthBearerValidatorCallback =>
      val token = callback.tokenValue
      try {
        val until = check(token)
        callback.token(new OAuthBearerToken {
          override def value: String = callback.tokenValue
          override def scope: Scopes[String] = Scopes.of()
          override def lifetimeMs: Long = until.toEpochMilli
          override def principalName: String = option("principal")
          override def startTimeMs: java.lang.Long = null
        })
      } catch {
        case error: RuntimeException =>
          println(s"MSK refuses a token: ${error.getMessage}") // the broker's own line has no reason
          callback.error("invalid_token", null, null)
      }
    case _ => ()
  }

  private def option(name: String): String = options.get(name).toString

  /** Until when it counts. */
  private def check(token: String): Instant = {
    val url = URI.create(new String(Base64.getUrlDecoder.decode(token), UTF_8))
    def need(what: String, found: String, wanted: String): Unit =
      if (found != wanted) throw new IllegalArgumentException(s"$what is $found, not $wanted")
    val region = option("region")
    need("the scheme", url.getScheme, "https")
    need("the host", url.getRawAuthority, s"kafka.$region.amazonaws.com")
    need("the path", url.getRawPath, "/")
    val query = url.getRawQuery.split("&").toSeq.map { part =>
      val at = part.indexOf('=')
      URLDecoder.decode(part.take(at), UTF_8) -> URLDecoder.decode(part.drop(at + 1), UTF_8)
    }
    val values = query.toMap
    need("the number of values", values.size.toString, query.size.toString)
    need("the action", values("Action"), "kafka-cluster:Connect")
    need("the algorithm", values("X-Amz-Algorithm"), "AWS4-HMAC-SHA256")
    need("the signed header", values("X-Amz-SignedHeaders"), "host")
    val time = values("X-Amz-Date")
    val scope = s"${time.take(8)}/$region/kafka-cluster/aws4_request"
    need("the credential", values("X-Amz-Credential"), s"${option("id")}/$scope")
    val signed = query.filterNot { case (name, _) => name == "X-Amz-Signature" || name == "User-Agent" }
    val canonical = signed.map { case (name, value) => s"${encode(name)}=${encode(value)}" }.sorted.mkString("&")
    val request = s"GET\n/\n$canonical\nhost:${url.getRawAuthority}\n\nhost\n${hex(digest(""))}"
    val text = s"AWS4-HMAC-SHA256\n$time\n$scope\n${hex(digest(request))}"
    val key = scope.split("/").foldLeft(s"AWS4${option("secret")}".getBytes(UTF_8))(sign)
    need("the signature", values("X-Amz-Signature"), hex(sign(key, text)))
    val seconds = values("X-Amz-Expires").toLong
    if (seconds < 1 || seconds > 900) throw new IllegalArgumentException(s"a lifetime of $seconds s")
    val from = Instant.from(DateTimeFormatter.ofPattern("yyyyMMdd'T'HHmmss'Z'").withZone(ZoneOffset.UTC).parse(time))
    val until = from.plusSeconds(seconds)
    if (until.isBefore(Instant.now)) throw new IllegalArgumentException(s"it expired at $until")
    until
  }

  private def sign(key: Array[Byte], text: String): Array[Byte] = {
    val mac = Mac.getInstance("HmacSHA256")
    mac.init(new SecretKeySpec(key, "HmacSHA256"))
    mac.doFinal(text.getBytes(UTF_8))
  }

  private def digest(text: String): Array[Byte] = MessageDigest.getInstance("SHA-256").digest(text.getBytes(UTF_8))
  private def hex(bytes: Array[Byte]): String = HexFormat.of.formatHex(bytes)
  private def encode(text: String): String =
    URLEncoder.encode(text, UTF_8).replace("+", "%20").replace("*", "%2A").replace("%7E", "~")
}
